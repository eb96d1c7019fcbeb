"""Manifests: what a version consists of, and digests of its tensors."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from slimtensors import _core
from slimtensors.archive.dialects.entries import check_version
from slimtensors.checkpoint.distributed.pieces import Box, find_overlap, format_offset
from slimtensors.checkpoint.documents import Fields, is_plain_name, is_sealed, parse_object, seal
from slimtensors.errors import CorruptFileError, FormatError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Json, Spec, as_bytes, ceil_div, dtype_name

VERSION = 1
"""Newest version of the format of manifests."""
FORMAT = "slimtensors sync"
MAX_NUMBER = 10**8 - 1
"""Largest number of a version."""

_SEAL = ',\n"crc32c": '
_HASHED = 1 << 16
"""Bytes per checksum in the digest of a tensor."""


def digest_tensor(x: Tensor, each: Each = serially) -> str:
    """Return 128 bits that identify dtype, shape and bytes: a hash of checksums of its chunks.

    It finds accidental differences at the speed of memory; files are sealed by SHA-256.
    """
    data = as_bytes(x).numpy()
    count = ceil_div(data.size, _HASHED)
    sums = np.zeros(count, np.uint32)
    step = 64  # chunks per piece of work

    def checksum(piece: int) -> None:
        for i in range(piece * step, min(piece * step + step, count)):
            sums[i] = _core.crc32c(data[i * _HASHED : (i + 1) * _HASHED])

    each(checksum, ceil_div(count, step))
    digest = hashlib.sha256(f"{dtype_name(x.dtype)} {list(x.shape)}\n".encode())
    digest.update(sums.astype("<u4").tobytes())
    return digest.hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class VersionFile:
    """A file of a version."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class PublishedPart:
    """A part of a tensor that one rank has written, usually all of it."""

    rank: int
    box: Box
    digest: str


@dataclass(frozen=True, slots=True)
class PublishedTensor:
    """A tensor of a version."""

    spec: Spec
    parts: tuple[PublishedPart, ...]

    def keys(self, name: str) -> Iterator[tuple[str, PublishedPart]]:
        """Yield the parts with their names in files: the tensor's own if there is one part."""
        for part in self.parts:
            yield format_key(name, self.spec, part.box), part


def format_key(name: str, spec: Spec, box: Box) -> str:
    """Return the name of a part of a tensor in the file of its rank."""
    return name if box.shape == spec.shape else f"{name}{format_offset(box)}"


Files = Mapping[int, VersionFile]
"""Rank -> its file."""


@dataclass(frozen=True)
class Version:
    """The manifest of a version."""

    run: str
    """Random name of the store, the same in all its versions."""
    number: int
    """1, 2, … without gaps."""
    step: int
    tensors: Mapping[str, PublishedTensor]
    tied: Mapping[str, str]
    changed: int
    """Items that differ from the previous version; all items in the first."""
    previous: str | None = None
    """SHA-256 of the manifest of the previous version, None in the first."""
    delta: Files | None = None
    """Differences from the previous version."""
    keyframe: Files | None = None
    """All tensors."""

    @property
    def items(self) -> int:
        """Number of elements of all tensors."""
        return sum(tensor.spec.numel for tensor in self.tensors.values())

    @property
    def delta_bytes(self) -> int | None:
        """Bytes to download for a reader of the previous version; None if there is no delta."""
        return None if self.delta is None else sum(file.size for file in self.delta.values())

    @property
    def keyframe_bytes(self) -> int | None:
        """Bytes to download for other readers; None if this is not a keyframe."""
        return None if self.keyframe is None else sum(f.size for f in self.keyframe.values())

    @property
    def bits_per_change(self) -> float | None:
        """Bits of the delta per changed element; None without changes or delta."""
        size = self.delta_bytes
        return None if size is None or not self.changed else 8 * size / self.changed

    def specs(self) -> dict[str, Spec]:
        """Return dtype and shape of each name, aliases included."""
        return {name: self.find(name).spec for name in (*self.tensors, *self.tied)}

    def has(self, name: str) -> bool:
        """Return True if a tensor was published under this name, which may be an alias."""
        return name in self.tensors or name in self.tied

    def find(self, name: str) -> PublishedTensor:
        """Return a tensor by its name or an alias."""
        return self.tensors[self.tied.get(name, name)]

    def to_json(self) -> Json:
        """Return a short description without tensors."""
        return {
            "number": self.number,
            "step": self.step,
            "delta_bytes": self.delta_bytes,
            "keyframe_bytes": self.keyframe_bytes,
            "changed": self.changed,
            "items": self.items,
            "bits_per_change": self.bits_per_change,
        }

    def to_text(self) -> str:
        """Return the manifest: JSON with one line per tensor, a checksum at the end."""
        head: Json = {
            "format": FORMAT,
            "version": VERSION,
            "run": self.run,
            "number": self.number,
            "step": self.step,
            "previous": self.previous,
            "changed": self.changed,
            "delta": _format_files(self.delta),
            "keyframe": _format_files(self.keyframe),
            "tied": self.tied,
        }
        rows = [f"{_dump(name)}: {_dump(_format_tensor(x))}" for name, x in self.tensors.items()]
        lines = [f"{_dump(key)}: {_dump(value)}" for key, value in head.items()]
        tensors = "{\n" + ",\n".join(rows) + "\n}" if rows else "{}"
        return seal("{\n" + ",\n".join([*lines, f'"tensors": {tensors}']), _SEAL)

    @classmethod
    def from_text(cls, text: str) -> "Version":
        """Parse a manifest and check all of it."""
        fields = parse_object(text, FORMAT, strict=lambda version: True)
        check_version(fields.integer("version"), VERSION)
        if not is_sealed(text, _SEAL):
            raise CorruptFileError("checksum mismatch; the file is damaged")
        fields.check_keys(
            {*("format", "version", "run", "number", "step", "previous", "changed")}
            | {*("delta", "keyframe", "tied", "tensors", "crc32c")}
        )
        delta, keyframe = _parse_files(fields, "delta"), _parse_files(fields, "keyframe")
        version = cls(
            run=fields.text("run"),
            number=fields.integer("number", low=1, high=MAX_NUMBER),
            step=fields.integer("step"),
            tensors=fields.table("tensors", _parse_tensor),
            tied=fields.table("tied", Fields.text),
            changed=fields.integer("changed", low=0),
            previous=None if fields.data["previous"] is None else fields.text("previous"),
            delta=delta,
            keyframe=keyframe,
        )
        if delta is None and keyframe is None:
            raise CorruptFileError("neither a delta nor a keyframe")
        if not version.tied.keys().isdisjoint(version.tensors) or not (
            set(version.tied.values()) <= version.tensors.keys()
        ):
            raise CorruptFileError("tied: invalid names")
        keys = [key for name, x in version.tensors.items() for key, _ in x.keys(name)]
        if len(set(keys)) < len(keys):
            raise CorruptFileError("tensors: two parts have the same name")
        return version


def _dump(value: object) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _format_files(files: Files | None) -> list[Json] | None:
    if files is None:
        return None
    return [
        {"rank": rank, "name": file.name, "bytes": file.size, "sha256": file.sha256}
        for rank, file in sorted(files.items())
    ]


def _format_tensor(tensor: PublishedTensor) -> Json:
    parts = [[p.rank, p.box.offset, p.box.shape, p.digest] for p in tensor.parts]
    return {**tensor.spec.to_json(), "parts": parts}


def _parse_files(fields: Fields, key: str) -> Files | None:
    if key in fields.data and fields.data[key] is None:
        return None
    files: dict[int, VersionFile] = {}
    for item in fields.items(key):
        if not isinstance(item, dict):
            raise CorruptFileError(f"{key}: expected a list of objects")
        row = Fields(item, f"{key}: ")
        row.check_keys(("rank", "name", "bytes", "sha256"))
        name = row.text("name")
        if not is_plain_name(name) or ":" in name:
            raise CorruptFileError(f"{key}: invalid file name {name!r}")
        file = VersionFile(name, row.integer("bytes", low=1), row.text("sha256"))
        if files.setdefault(row.integer("rank", low=0), file) is not file:
            raise CorruptFileError(f"{key}: two files of the same rank")
    return files


def _parse_tensor(table: Fields, name: str) -> PublishedTensor:
    row = table.child(name)
    row.check_keys(("dtype", "shape", "parts"))
    try:
        spec = Spec.from_json(dict(row.data))
    except FormatError as error:
        raise CorruptFileError(f"{name}: {error}") from error
    parts = tuple(_parse_part(item, name) for item in row.items("parts"))
    boxes = [part.box for part in parts]
    if (
        not all(box.is_inside(spec.shape) for box in boxes)
        or sum(box.numel for box in boxes) != spec.numel
        or find_overlap(boxes)
        or not parts
    ):
        raise CorruptFileError(f"{name}: the parts do not cover the tensor exactly once")
    return PublishedTensor(spec, parts)


def _parse_part(data: object, name: str) -> PublishedPart:
    match data:
        case [int(rank), list(offset), list(shape), str(digest)] if all(
            type(n) is int for n in (rank, *offset, *shape)
        ):
            return PublishedPart(rank, Box(tuple(offset), tuple(shape)), digest)
    raise CorruptFileError(f"{name}: malformed part")


def check_boxes(name: str, spec: Spec, boxes: Sequence[Box]) -> None:
    """Raise if the boxes of all ranks do not cover a tensor exactly once."""
    if sum(box.numel for box in boxes) != spec.numel or find_overlap(boxes):
        raise FormatError(f"{name}: the shards of all ranks do not cover the tensor exactly once")
