"""What a distributed checkpoint says of itself: `distributed.json`, which makes it complete."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slimtensors import _core
from slimtensors.checkpoint.commit import write_file
from slimtensors.container import DISTRIBUTED as MANIFEST
from slimtensors.distributed.boxes import Box, overlapping
from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError
from slimtensors.spec import Json, Spec, parse_shape

VERSION = 1
PIECE = 2 << 20
"""Bytes of the rows that are stored together: what a reader of one row has to decode."""

Keys = tuple[str | int, ...]
"""The keys that lead to a value in the nested state."""

_FORMAT = "slimtensors distributed checkpoint"
_SEAL = ',\n"crc32c": '


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor that one rank has stored."""

    box: Box
    file: int
    """Number of the file that holds it."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor and the chunks that it is made of."""

    spec: Spec
    chunks: tuple[Chunk, ...]
    path: Keys | None


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A value that is no tensor."""

    file: int
    path: Keys | None


@dataclass(frozen=True)
class Base:
    """The checkpoint that a delta needs."""

    name: str
    """Of its folder, beside this one."""
    run: str


@dataclass(frozen=True)
class Manifest:
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
    base: Base | None = None
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
    def from_text(cls, text: str) -> "Manifest":
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


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the file that makes a checkpoint complete."""
    write_file(folder / MANIFEST, manifest.to_text().encode())


def read_manifest(folder: Path) -> Manifest:
    """Read what a distributed checkpoint says of itself."""
    path = folder / MANIFEST
    try:
        return Manifest.from_text(path.read_text(encoding="utf-8"))
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


def _parsed(data: Json) -> Manifest:
    files, base = data["files"], data["base"]
    for name, size in files.items():
        # A plain name: what a file says must not lead to another folder.
        if not name or name.startswith(".") or set(name) & set("/\\:\0") or type(size) is not int:
            raise CorruptFileError(f"{name!r} is not a file of this folder")
    if base is not None and (not _is_plain(base["name"]) or not isinstance(base["run"], str)):
        raise CorruptFileError(f"{str(base)[:80]} is not a checkpoint beside this one")
    if type(data["piece_bytes"]) is not int or data["piece_bytes"] < 1:
        raise CorruptFileError(f"pieces of {data['piece_bytes']!r} bytes")
    return Manifest(
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
        base=Base(base["name"], base["run"]) if base is not None else None,
        piece_bytes=data["piece_bytes"],
        errors={name: float(error) for name, error in data["errors"].items()},
        kept_exact={name: str(note) for name, note in data["kept_exact"].items()},
    )


def _is_plain(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\:\0")


def _tensor(name: str, row: Json, files: int) -> StoredTensor:
    spec = Spec.from_json(row)
    chunks = tuple(
        Chunk(Box(parse_shape(at), parse_shape(shape)), _number(name, file, files))
        for at, shape, file in row["chunks"]
    )
    for chunk in chunks:
        if not chunk.box.is_in(spec.shape):
            raise CorruptFileError(f"{name}: a chunk lies outside of the tensor: {chunk.box}")
    if sum(chunk.box.numel for chunk in chunks) != spec.numel:
        raise CorruptFileError(f"{name}: chunks are missing, or there are too many")
    if found := overlapping([chunk.box for chunk in chunks]):
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
