"""Manifest of a distributed checkpoint: `distributed.json`, which makes it complete."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slimtensors import _core
from slimtensors.checkpoint.distributed.pieces import PIECE_BYTES, Box, KeyPath, find_overlap
from slimtensors.errors import (
    CorruptFileError,
    FormatError,
    MismatchError,
    UnsupportedTensorError,
    UnsupportedVersionError,
)
from slimtensors.storage import DISTRIBUTED as MANIFEST
from slimtensors.storage import open_for_reading, read_text, write_file_atomically
from slimtensors.tensor import Json, Spec, parse_shape

VERSION = 1
_FORMAT = "slimtensors distributed checkpoint"
_CHECKSUM = ',\n"crc32c": '


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
        return f"{body}{_CHECKSUM}{_core.crc32c(body.encode())}\n}}\n"

    @classmethod
    def from_text(cls, text: str) -> "DistributedManifest":
        """Parse the JSON form and check all of it."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise CorruptFileError("not the manifest of a distributed checkpoint")
        if type(data.get("version")) is int and data["version"] > VERSION:
            raise UnsupportedVersionError(
                f"format version {data['version']} is newer than {VERSION}; upgrade slimtensors"
            )
        body, _, checksum = text.rpartition(_CHECKSUM)
        if checksum != f"{_core.crc32c(body.encode())}\n}}\n":
            raise CorruptFileError("checksum mismatch; the file is damaged")
        return _parse_manifest(data)


def write_distributed_manifest(folder: Path, manifest: DistributedManifest) -> None:
    """Write `distributed.json`, which makes a checkpoint complete."""
    write_file_atomically(folder / MANIFEST, manifest.to_text().encode())


def read_distributed_manifest(folder: Path) -> DistributedManifest:
    """Read `distributed.json`."""
    path = folder / MANIFEST
    try:
        return DistributedManifest.from_text(read_text(path))
    except FileNotFoundError:
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: no such checkpoint") from None
        raise FormatError(
            f"{folder} is not a distributed checkpoint ({MANIFEST} not found)"
        ) from None
    except UnsupportedVersionError as error:
        raise UnsupportedVersionError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path}: {error}") from error


def read_base_name(folder: Path) -> str | None:
    """Return the folder name of the base of a checkpoint; read only the head of the manifest."""
    with io.TextIOWrapper(open_for_reading(folder / MANIFEST), "utf-8", "replace") as file:
        line = next((line for line in file if line.startswith('"base": ')), '"base": null')
    try:
        base = json.loads("{" + line.rstrip(",\n") + "}")["base"]
        return str(base["name"]) if base is not None else None
    except (ValueError, TypeError, KeyError):  # damaged: cannot be loaded with a base either
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


def _parse_manifest(data: Json) -> DistributedManifest:
    files, base = data["files"], data["base"]
    for name, size in files.items():
        # Plain names only: a manifest must not point to another folder.
        if not name or name.startswith(".") or set(name) & set("/\\:\0") or type(size) is not int:
            raise CorruptFileError(f"invalid file name {name!r}")
    if base is not None and (not _is_plain(base["name"]) or not isinstance(base["run"], str)):
        raise CorruptFileError(f"invalid base {str(base)[:80]}")
    if type(data["piece_bytes"]) is not int or data["piece_bytes"] < 1:
        raise CorruptFileError(f"invalid piece_bytes {data['piece_bytes']!r}")
    return DistributedManifest(
        run=str(data["run"]),
        created=str(data["created"]),
        world=int(data["world"]),
        profile=str(data["profile"]),
        files=files,
        tensors={
            name: _parse_tensor(name, row, len(files)) for name, row in data["tensors"].items()
        },
        objects={
            name: StoredObject(
                _parse_file(name, row["file"], len(files)), _parse_path(name, row["path"])
            )
            for name, row in data["objects"].items()
        },
        base=DistributedBase(base["name"], base["run"]) if base is not None else None,
        piece_bytes=data["piece_bytes"],
        errors={name: float(error) for name, error in data["errors"].items()},
        kept_exact={name: str(note) for name, note in data["kept_exact"].items()},
    )


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _parse_tensor(name: str, row: Json, files: int) -> StoredTensor:
    spec = Spec.from_json(row)
    chunks = tuple(
        StoredChunk(Box(parse_shape(offset), parse_shape(shape)), _parse_file(name, file, files))
        for offset, shape, file in row["chunks"]
    )
    for chunk in chunks:
        if not chunk.box.is_inside(spec.shape):
            raise CorruptFileError(f"{name}: chunk out of bounds: {chunk.box}")
    if (count := sum(chunk.box.numel for chunk in chunks)) != spec.numel:
        raise CorruptFileError(f"{name}: expected chunks of {spec.numel} elements, got {count}")
    if found := find_overlap([chunk.box for chunk in chunks]):
        raise CorruptFileError(f"{name}: chunks overlap: {found[0]} and {found[1]}")
    return StoredTensor(spec, chunks, _parse_path(name, row["path"]))


def _parse_file(name: str, file: object, files: int) -> int:
    if type(file) is not int or not 0 <= file < files:
        raise CorruptFileError(f"{name}: invalid file index {str(file)[:20]}, there are {files}")
    return file


def _parse_path(name: str, path: object) -> KeyPath | None:
    if path is None:
        return None
    if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
        raise CorruptFileError(f"{name}: invalid path {str(path)[:80]}")
    return tuple(path)


def to_metadata(manifest: DistributedManifest) -> Metadata:
    """Return the metadata of a checkpoint for torch's planners."""
    items: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: _to_tensor_metadata(tensor) for name, tensor in manifest.tensors.items()
    }
    items |= {name: BytesStorageMetadata() for name in manifest.objects}
    paths = {name: tensor.path for name, tensor in manifest.tensors.items() if tensor.path}
    paths |= {name: value.path for name, value in manifest.objects.items() if value.path}
    return Metadata(items, planner_data=paths or None)


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
