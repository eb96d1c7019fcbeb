"""What a distributed checkpoint says of itself: `distributed.json`, which makes it complete."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError
from slimtensors.storage import DISTRIBUTED as MANIFEST
from slimtensors.storage.atomic import write_file_atomically
from slimtensors.tensor import Json, Spec, parse_shape


@dataclass(frozen=True, slots=True)
class Box:
    """Where a part of a tensor begins, and how large it is."""

    at: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Return what two boxes of the same tensor have in common; none if nothing."""
        begin = tuple(map(max, self.at, other.at))
        ends = zip(self.at, self.shape, other.at, other.shape, strict=True)
        shape = tuple(
            min(a + n, b + m) - start for start, (a, n, b, m) in zip(begin, ends, strict=True)
        )
        return Box(begin, shape) if all(n > 0 for n in shape) else None

    def of(self, x: Tensor, outer: "Box") -> Tensor:
        """Return the items of this box as a view of `x`, which holds those of `outer`."""
        for dim, (at, start, n) in enumerate(zip(self.at, outer.at, self.shape, strict=True)):
            x = x.narrow(dim, at - start, n)
        return x

    def is_in(self, shape: tuple[int, ...]) -> bool:
        """Tell whether this is a part of a tensor of such a shape."""
        return len(self.at) == len(self.shape) == len(shape) and all(
            at >= 0 and n >= 0 and at + n <= size
            for at, n, size in zip(self.at, self.shape, shape, strict=True)
        )


def find_overlaps(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of a tensor that have items in common; none if all lie apart."""
    filled = [box for box in boxes if box.numel]
    if len(filled) < 2:
        return None
    # Along the dimension that tells the most apart, few others reach to where a box begins.
    dims = range(len(filled[0].at))
    dim = max(dims, key=lambda dim: len({box.at[dim] for box in filled}))
    reaching: list[Box] = []
    for box in sorted(filled, key=lambda box: box.at[dim]):
        reaching = [other for other in reaching if other.at[dim] + other.shape[dim] > box.at[dim]]
        for other in reaching:
            if box.overlap(other):
                return other, box
        reaching.append(box)
    return None


def split_box(chunk: Box, dtype: torch.dtype, limit: int, part: Box | None = None) -> Iterator[Box]:
    """Yield the pieces in which a chunk is stored: as many rows as `limit` bytes hold, or one.

    With `part`, a box in the chunk, only those that it touches.
    """
    part = part or chunk
    if not chunk.shape or not chunk.numel:
        yield chunk
        return
    rows = max(1, limit // (math.prod(chunk.shape[1:]) * dtype.itemsize))
    top, bottom = chunk.at[0], chunk.at[0] + chunk.shape[0]
    first = top + (part.at[0] - top) // rows * rows
    for begin in range(first, part.at[0] + part.shape[0], rows):
        height = min(rows, bottom - begin)
        yield Box((begin, *chunk.at[1:]), (height, *chunk.shape[1:]))


VERSION = 1
PIECE = 2 << 20
"""Bytes of the rows that are stored together: what a reader of one row has to decode."""

Keys = tuple[str | int, ...]
"""The keys that lead to a value in the nested state."""

_FORMAT = "slimtensors distributed checkpoint"
_SEAL = ',\n"crc32c": '


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A part of a tensor that one rank has stored."""

    box: Box
    file: int
    """Number of the file that holds it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the chunks that it is made of."""

    spec: Spec
    chunks: tuple[StoredChunk, ...]
    path: Keys | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is no tensor."""

    file: int
    path: Keys | None


@dataclass(frozen=True)
class DistributedBase:
    """The checkpoint that a delta needs."""

    name: str
    """Of its folder, beside this one."""
    run: str


@dataclass(frozen=True)
class DistributedManifest:
    """What a distributed checkpoint is."""

    run: str
    """Different for every save, and said by every file of it."""
    created: str
    world: int
    """How many ranks have saved it."""
    profile: str
    files: Mapping[str, int]
    """Names and sizes, in the order of their numbers."""
    tensors: Mapping[str, StoredTensor]
    objects: Mapping[str, StoredObject]
    base: DistributedBase | None = None
    piece_bytes: int = PIECE
    errors: Mapping[str, float] = field(default_factory=dict)
    """The largest relative RMS error of a piece of each tensor that is not exact."""
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    """Tensors that were to be rounded and are not, or not in all pieces, and why."""

    def to_text(self) -> str:
        """Return JSON, a line for each tensor, sealed by a checksum."""
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
            "tensors": {name: _tensor_json(tensor) for name, tensor in self.tensors.items()},
            "objects": {
                name: {"file": stored.file, "path": stored.path}
                for name, stored in self.objects.items()
            },
            "errors": self.errors,
            "kept_exact": self.kept_exact,
        }
        lines = [*_lines(head), *(f'"{key}": {_table(rows)}' for key, rows in tables.items())]
        body = "{\n" + ",\n".join(lines)
        return f"{body}{_SEAL}{_core.crc32c(body.encode())}\n}}\n"

    @classmethod
    def from_text(cls, text: str) -> "DistributedManifest":
        """Parse and check all of it."""
        data = json.loads(text)
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise CorruptFileError("is not the description of a distributed checkpoint")
        if type(data.get("version")) is int and data["version"] > VERSION:
            raise UnsupportedVersionError(
                f"has version {data['version']}, this library reads up to {VERSION};"
                " update slimtensors"
            )
        body, _, seal = text.rpartition(_SEAL)
        if seal != f"{_core.crc32c(body.encode())}\n}}\n":
            raise CorruptFileError("the checksum differs: the file is damaged")
        return _parsed(data)


def write_manifest(folder: Path, manifest: DistributedManifest) -> None:
    """Write the file that makes a checkpoint complete."""
    write_file_atomically(folder / MANIFEST, manifest.to_text().encode())


def read_manifest(folder: Path) -> DistributedManifest:
    """Read what a distributed checkpoint says of itself."""
    path = folder / MANIFEST
    try:
        return DistributedManifest.from_text(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: no such checkpoint") from None
        raise FormatError(f"{folder}: is no distributed checkpoint: no {MANIFEST} in it") from None
    except UnsupportedVersionError as error:
        raise UnsupportedVersionError(f"{path}: {error}") from None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{path}: {error}") from error


def base_name(folder: Path) -> str | None:
    """Return the folder from which a checkpoint says to be a difference, reading only the head."""
    with (folder / MANIFEST).open(encoding="utf-8", errors="replace") as file:
        line = next((line for line in file if line.startswith('"base": ')), '"base": null')
    try:
        base = json.loads("{" + line.rstrip(",\n") + "}")["base"]
        return str(base["name"]) if base is not None else None
    except (ValueError, TypeError, KeyError):  # damaged: it needs nothing any more
        return None


def is_distributed(folder: Path) -> bool:
    """Tell whether a folder holds a distributed checkpoint that was completed."""
    return (folder / MANIFEST).is_file()


def _lines(rows: Mapping[str, Any]) -> Iterator[str]:
    for key, value in rows.items():
        words = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
        yield f"{json.dumps(key, ensure_ascii=False)}: {words}"


def _table(rows: Mapping[str, Any]) -> str:
    return "{\n" + ",\n".join(_lines(rows)) + "\n}" if rows else "{}"


def _tensor_json(tensor: StoredTensor) -> Json:
    chunks = [[chunk.box.at, chunk.box.shape, chunk.file] for chunk in tensor.chunks]
    return {**tensor.spec.to_json(), "path": tensor.path, "chunks": chunks}


def _parsed(data: Json) -> DistributedManifest:
    files, base = data["files"], data["base"]
    for name, size in files.items():
        # A plain name: what a file says must not lead to another folder.
        if not name or name.startswith(".") or set(name) & set("/\\:\0") or type(size) is not int:
            raise CorruptFileError(f"{name!r} is not a file of this folder")
    if base is not None and (not _is_plain(base["name"]) or not isinstance(base["run"], str)):
        raise CorruptFileError(f"{str(base)[:80]} is not a checkpoint beside this one")
    if type(data["piece_bytes"]) is not int or data["piece_bytes"] < 1:
        raise CorruptFileError(f"pieces of {data['piece_bytes']!r} bytes")
    return DistributedManifest(
        run=str(data["run"]),
        created=str(data["created"]),
        world=int(data["world"]),
        profile=str(data["profile"]),
        files=files,
        tensors={name: _tensor(name, row, len(files)) for name, row in data["tensors"].items()},
        objects={
            name: StoredObject(_number(name, row["file"], len(files)), _path(name, row["path"]))
            for name, row in data["objects"].items()
        },
        base=DistributedBase(base["name"], base["run"]) if base is not None else None,
        piece_bytes=data["piece_bytes"],
        errors={name: float(error) for name, error in data["errors"].items()},
        kept_exact={name: str(note) for name, note in data["kept_exact"].items()},
    )


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _tensor(name: str, row: Json, files: int) -> StoredTensor:
    spec = Spec.from_json(row)
    chunks = tuple(
        StoredChunk(Box(parse_shape(at), parse_shape(shape)), _number(name, file, files))
        for at, shape, file in row["chunks"]
    )
    for chunk in chunks:
        if not chunk.box.is_in(spec.shape):
            raise CorruptFileError(f"{name}: a chunk lies outside of the tensor: {chunk.box}")
    if sum(chunk.box.numel for chunk in chunks) != spec.numel:
        raise CorruptFileError(f"{name}: chunks are missing, or there are too many")
    if found := find_overlaps([chunk.box for chunk in chunks]):
        raise CorruptFileError(f"{name}: two chunks overlap: {found[0]} and {found[1]}")
    return StoredTensor(spec, chunks, _path(name, row["path"]))


def _number(name: str, file: object, files: int) -> int:
    if type(file) is not int or not 0 <= file < files:
        raise CorruptFileError(f"{name}: should be in file {str(file)[:20]}, of {files}")
    return file


def _path(name: str, path: object) -> Keys | None:
    if path is None:
        return None
    if not isinstance(path, list) or not all(type(key) in (str, int) for key in path):
        raise CorruptFileError(f"{name}: lies nowhere: {str(path)[:80]}")
    return tuple(path)
