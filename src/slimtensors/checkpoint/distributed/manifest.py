"""Manifest of a distributed checkpoint: `distributed.json`, which makes it complete."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slimtensors.archive.dialects.entries import check_version
from slimtensors.checkpoint.distributed.pieces import PIECE_BYTES, Box, KeyPath, find_overlap
from slimtensors.checkpoint.documents import (
    Fields,
    is_plain_name,
    is_sealed,
    parse_document,
    parse_object,
    seal,
)
from slimtensors.errors import (
    CorruptFileError,
    FormatError,
    MismatchError,
    UnsupportedTensorError,
)
from slimtensors.storage import DISTRIBUTED as MANIFEST
from slimtensors.storage import Folder, open_for_reading, write_file_atomically
from slimtensors.tensor import Json, Spec, is_valid_text, parse_shape

VERSION = 1
DCP_VERSION: str = getattr(filesystem, "CURRENT_DCP_VERSION", "1.0.0")
"""Version of torch's metadata; releases before 2.7 have none."""
_FORMAT = "slimtensors distributed checkpoint"
_SEAL = ',\n"crc32c": '


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor that one rank has stored."""

    box: Box
    file: int
    """Index of the file that contains it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and its chunks."""

    spec: Spec
    chunks: tuple[StoredChunk, ...]
    path: KeyPath | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is not a tensor."""

    file: int
    path: KeyPath | None


@dataclass(frozen=True)
class DistributedBase:
    """The distributed checkpoint that a delta needs."""

    name: str
    """Name of its folder, next to the delta."""
    run: str


@dataclass(frozen=True)
class DistributedManifest:
    """The content of `distributed.json`."""

    run: str
    """Random id of the save, also stored in each of its files."""
    created: str
    world: int
    """Number of ranks that saved the checkpoint."""
    profile: str
    files: Mapping[str, int]
    """File names and sizes, in the order of their indices."""
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    base: DistributedBase | None = None
    piece_bytes: int = PIECE_BYTES
    errors: Mapping[str, float] = field(default_factory=dict)
    """Largest relative RMS error among the pieces of each tensor that is not exact."""
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    """Tensors of which pieces should have been rounded but were stored exactly, with the reason."""

    def to_text(self) -> str:
        """Return JSON with one line per tensor and a checksum at the end."""
        base = {"name": self.base.name, "run": self.base.run} if self.base else None
        head = {
            "format": _FORMAT,
            "version": VERSION,
            "run": self.run,
            "created": self.created,
            "world": self.world,
            "profile": self.profile,
            "base": base,
            "piece_bytes": self.piece_bytes,
        }
        tables: dict[str, Mapping[str, Any]] = {
            "files": self.files,
            "tensors": {name: _format_tensor(tensor) for name, tensor in self.tensors.items()},
            "objects": {
                name: {"file": stored.file, "path": stored.path}
                for name, stored in self.objects.items()
            },
            "errors": self.errors,
            "kept_exact": self.kept_exact,
        }
        tables_text = (f'"{key}": {_format_table(rows)}' for key, rows in tables.items())
        body = "{\n" + ",\n".join([*_format_rows(head), *tables_text])
        return seal(body, _SEAL)

    @classmethod
    def from_text(cls, text: str) -> "DistributedManifest":
        """Parse the JSON form and check all of it."""
        fields = parse_object(text, _FORMAT, strict=lambda version: True)
        check_version(fields.integer("version"), VERSION)
        if not is_sealed(text, _SEAL):
            raise CorruptFileError("checksum mismatch; the file is damaged")
        return _parse_manifest(fields)


def write_distributed_manifest(folder: Path, manifest: DistributedManifest) -> None:
    """Write `distributed.json`, which makes a checkpoint complete."""
    write_file_atomically(folder / MANIFEST, manifest.to_text().encode())


def read_distributed_manifest(folder: Folder) -> DistributedManifest:
    """Read `distributed.json`."""
    return parse_document(folder, MANIFEST, "distributed checkpoint", DistributedManifest.from_text)


def read_base_name(folder: Folder) -> str | None:
    """Return the folder name of the base of a checkpoint; read only the head of the manifest."""
    path = folder / MANIFEST
    raw = open_for_reading(path) if isinstance(path, Path) else io.BytesIO(path.read())
    with io.TextIOWrapper(raw, "utf-8", "replace") as file:
        line = next((line for line in file if line.startswith('"base": ')), '"base": null')
    try:
        base = json.loads("{" + line.rstrip(",\n") + "}")["base"]
        return str(base["name"]) if base is not None else None
    except (
        ValueError,
        TypeError,
        KeyError,
        RecursionError,
    ):  # damaged: cannot be loaded with a base either
        return None


def _format_rows(rows: Mapping[str, Any]) -> Iterator[str]:
    for key, value in rows.items():
        text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        yield f"{json.dumps(key, ensure_ascii=False)}: {text}"


def _format_table(rows: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(_format_rows(rows)) + "\n}" if rows else "{}"


def _format_tensor(tensor: StoredTensor) -> Json:
    chunks = [[chunk.box.offset, chunk.box.shape, chunk.file] for chunk in tensor.chunks]
    return {**tensor.spec.to_json(), "path": tensor.path, "chunks": chunks}


_KEYS = {
    "format",
    "version",
    "run",
    "created",
    "world",
    "profile",
    "base",
    "piece_bytes",
    "files",
    "tensors",
    "objects",
    "errors",
    "kept_exact",
    "crc32c",
}


def _parse_manifest(fields: Fields) -> DistributedManifest:
    fields.check_keys(_KEYS)
    files = fields.table("files", _parse_size)
    base = None
    if fields.data["base"] is not None:
        row = fields.child("base")
        row.check_keys(("name", "run"))
        base = DistributedBase(row.folder_name("name"), row.text("run"))
    manifest = DistributedManifest(
        run=fields.text("run"),
        created=fields.text("created"),
        world=fields.integer("world", low=0),
        profile=fields.text("profile"),
        files=files,
        tensors=fields.table("tensors", partial(_parse_tensor, files=len(files))),
        objects=fields.table("objects", partial(_parse_object, files=len(files))),
        base=base,
        piece_bytes=fields.integer("piece_bytes", low=1),
        errors=fields.table("errors", Fields.finite_number),
        kept_exact=fields.table("kept_exact", Fields.text),
    )
    for name in manifest.tensors.keys() & manifest.objects.keys():
        raise CorruptFileError(f"{name}: both a tensor and an object")
    return manifest


def _parse_size(files: Fields, name: str) -> int:
    # Plain names only: a manifest must not point to another folder.
    if not is_plain_name(name) or ":" in name:
        raise CorruptFileError(f"files: invalid file name {name!r}")
    return files.integer(name, low=0)


def _parse_tensor(table: Fields, name: str, *, files: int) -> StoredTensor:
    row = table.child(name)
    row.check_keys(("dtype", "shape", "path", "chunks"))
    try:
        spec = Spec.from_json(dict(row.data))
        chunks = tuple(_parse_chunk(chunk, files) for chunk in row.items("chunks"))
    except FormatError as error:
        raise CorruptFileError(f"{row.where}{error}") from error
    boxes = [chunk.box for chunk in chunks]
    for box in boxes:
        if not box.is_inside(spec.shape):
            raise CorruptFileError(f"{row.where}chunk out of bounds: {box}")
    if (count := sum(box.numel for box in boxes)) != spec.numel:
        raise CorruptFileError(f"{row.where}expected chunks of {spec.numel} elements, got {count}")
    if found := find_overlap(boxes):
        raise CorruptFileError(f"{row.where}chunks overlap: {found[0]} and {found[1]}")
    return StoredTensor(spec, chunks, _parse_path(row))


def _parse_chunk(chunk: object, files: int) -> StoredChunk:
    match chunk:
        case [offset, shape, int(file)] if type(file) is int and 0 <= file < files:
            return StoredChunk(Box(parse_shape(offset), parse_shape(shape)), file)
    raise CorruptFileError(f"invalid chunk {str(chunk)[:80]}; there are {files} files")


def _parse_object(table: Fields, name: str, *, files: int) -> StoredObject:
    row = table.child(name)
    row.check_keys(("file", "path"))
    return StoredObject(row.integer("file", low=0, high=files - 1), _parse_path(row))


def _parse_path(row: Fields) -> KeyPath | None:
    if row.data["path"] is None:
        return None
    path = row.items("path")
    if not all(_is_key(key) for key in path):
        raise CorruptFileError(row.explain("path", "a list of names and numbers"))
    return tuple(path)


def _is_key(key: object) -> bool:
    return type(key) is int or (isinstance(key, str) and is_valid_text(key))


def to_metadata(manifest: DistributedManifest) -> Metadata:
    """Return the metadata of a checkpoint for torch's planners."""
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: _to_tensor_metadata(tensor) for name, tensor in manifest.tensors.items()
    }
    items |= {name: BytesStorageMetadata() for name in manifest.objects}
    paths = {name: tensor.path for name, tensor in manifest.tensors.items() if tensor.path}
    paths |= {name: value.path for name, value in manifest.objects.items() if value.path}
    metadata = Metadata(items, planner_data=paths or None)
    metadata.version = DCP_VERSION
    return metadata


def _to_tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.box.offset), torch.Size(chunk.box.shape))
        for chunk in tensor.chunks
    ]
    properties = TensorProperties(dtype=tensor.spec.dtype)
    return TensorStorageMetadata(properties, torch.Size(tensor.spec.shape), chunks)


@dataclass(frozen=True)
class WrittenItem:
    """Storage data of a written item, which its rank sends to the coordinator."""

    file: str
    bytes: int
    """Size of the file."""
    error: float | None = None
    """Largest relative RMS error of its pieces, or None if it is exact."""
    note: str = ""
    """Why it was stored exactly although it should have been rounded."""


def collect_results(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> tuple[dict[str, StoredTensor], dict[str, StoredObject], dict[str, int]]:
    """Return the tensors, objects and files of a checkpoint from the results of all ranks.

    Raise `MismatchError` unless exactly the planned items have been written.
    """
    written = {result.index: result.storage_data for part in results for result in part}
    files = {item.file: item.bytes for item in written.values()}
    file_indices = {file: i for i, file in enumerate(files)}
    paths = _check_paths(metadata.planner_data)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    missing: list[str] = []

    def pop_file(index: MetadataIndex) -> int:
        if index not in written:
            missing.append(index.fqn)
            return 0
        return file_indices[written.pop(index).file]

    for name, item in metadata.state_dict_metadata.items():
        if isinstance(item, BytesStorageMetadata):
            objects[name] = StoredObject(pop_file(MetadataIndex(name)), paths.get(name))
            continue
        chunks = tuple(
            StoredChunk(
                Box(tuple(c.offsets), tuple(c.sizes)), pop_file(MetadataIndex(name, c.offsets))
            )
            for c in item.chunks
        )
        spec = Spec(item.properties.dtype, tuple(item.size))
        tensors[name] = StoredTensor(spec, chunks, paths.get(name))
    if missing or written:
        extra = f"; not planned: {next(iter(written)).fqn}" if written else ""
        names = ", ".join(missing[:5])
        raise MismatchError(f"{len(missing)} planned items were not written: {names}{extra}")
    return tensors, objects, files


def _check_paths(planner_data: Any) -> Mapping[str, KeyPath]:
    """Return the key path of each value; raise if a planner has stored anything else."""
    if planner_data is None:
        return {}
    is_valid = isinstance(planner_data, Mapping) and all(
        isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
        for path in planner_data.values()
    )
    if not is_valid:
        kind = type(planner_data).__name__
        raise UnsupportedTensorError(f"planner data of type {kind} cannot be stored as JSON")
    return dict(planner_data)
