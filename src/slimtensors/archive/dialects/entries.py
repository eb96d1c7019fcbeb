"""Shared by all dialects: the manifest of a file, its entries, and plain tensors."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any, Protocol, cast

import numpy as np
from torch import Tensor

from slimtensors import _core
from slimtensors.archive.tree import outline_version
from slimtensors.codecs.changes import CHANGE_KINDS
from slimtensors.codecs.plan import Plan
from slimtensors.errors import CorruptFileError, UnsupportedVersionError
from slimtensors.parallel import Each
from slimtensors.storage import HeaderEntry, StoredFile, TensorBytes
from slimtensors.tensor import Json, Spec, allocate, as_bytes, is_valid_text, view_as

KEY = "slimtensors"
"""Metadata key of the manifest."""
VERSION = 4
"""Newest format version of manifests; each is written in the lowest that describes its file."""

MAX_COPIES = 15
"""Maximum number of names that are copies of one tensor, which limits the memory of a file."""

_CHUNK = 1 << 20
_SMALL = 32 << 10  # above this, torch copies with threads of its own
_SEAL = ',"crc32c":'


class Member(Protocol):
    """One tensor of an archive: described at once, read on demand."""

    @property
    def file(self) -> StoredFile:
        """File that contains it."""
        ...

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file."""
        ...

    def spec(self) -> Spec:
        """Return dtype and shape of the tensor."""
        ...

    def info(self) -> "TensorInfo":
        """Return how it is stored; reads its header only."""
        ...

    def load(self, each: Each) -> Tensor:
        """Read, check and decode it into newly allocated memory."""
        ...

    def load_exact(self, each: Each) -> list[Tensor]:
        """Return the losslessly stored tensors: itself, or its integers and scales."""
        ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """How a tensor is stored, as far as its header describes it."""

    spec: Spec
    plan: Plan | None
    """None if plain."""
    parts: Mapping[str, int]
    """Bytes of each part; the sum is the stored size."""
    error: float | None = None
    """Relative RMS error of the stored values; None if lossless."""
    codec: str = ""
    """How it is stored, if `plan` does not describe it."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor ready to be written."""

    pieces: Sequence[TensorBytes]
    plan: Plan | None
    """None if plain."""
    error: float | None = None
    """Relative RMS error; None if lossless."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each part."""
    is_one_tensor: bool = True
    """Whether readers find it under its name; otherwise they find the pieces."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """One entry of a file, not interpreted yet."""

    file: StoredFile
    entry: HeaderEntry
    checksum: int | None
    """CRC-32C of its bytes; None if not recorded."""

    def read(self, each: Each) -> Tensor:
        """Return its data, checked; valid until released."""
        raw = self.file.read(self.entry)
        if self.checksum is not None:
            self.check(checksum(raw, each))
        return view_as(raw, self.entry.spec)

    def check(self, found: int) -> None:
        """Raise if `found` is not the recorded checksum."""
        if self.checksum is not None and found != self.checksum:
            raise CorruptFileError("checksum mismatch: the file is damaged")


@dataclass(frozen=True, slots=True)
class PlainMember:
    """A tensor stored as plain safetensors."""

    stored: StoredEntry

    @property
    def file(self) -> StoredFile:
        """File that contains it."""
        return self.stored.file

    @property
    def stored_bytes(self) -> int:
        """Bytes in the file, as many as in memory."""
        return self.stored.entry.spec.nbytes

    def spec(self) -> Spec:
        """Return dtype and shape from the header of the file."""
        return self.stored.entry.spec

    def info(self) -> TensorInfo:
        """Return the info of a plain tensor."""
        return TensorInfo(self.spec(), None, {"data": self.stored_bytes})

    def load(self, each: Each) -> Tensor:
        """Copy the bytes, so that the result does not depend on the file."""
        stored = self.stored
        entry = stored.entry
        raw = stored.file.read(entry)
        if len(raw) <= _SMALL:
            out = view_as(raw, entry.spec).clone()
            stored.check(_core.crc32c(raw))
        else:
            out = allocate(entry.spec)
            stored.check(copy_bytes(raw, as_bytes(out), each))
        stored.file.release(entry)
        return out

    def load_exact(self, each: Each) -> list[Tensor]:
        """Return the tensor."""
        return [self.load(each)]

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read separately: a checksum covers the whole tensor."""
        return self.stored.checksum is None and len(self.spec().shape) > 1

    def load_rows(self, begin: int, end: int) -> Tensor:
        """Copy the rows `begin` to `end`."""
        spec, entry = self.spec(), self.stored.entry
        width = spec.nbytes // spec.shape[0]
        raw = self.file.read_part(entry, begin * width, end * width)
        rows = view_as(raw, Spec(spec.dtype, (end - begin, *spec.shape[1:]))).clone()
        self.file.release_part(entry, begin * width, end * width)
        return rows


def plain_tensor_bytes(name: str, x: Tensor, each: Each) -> TensorBytes:
    """Return `x` as a plain safetensors entry."""
    raw = as_bytes(x)
    return TensorBytes(name, Spec.of(x), [raw], checksum(raw, each))


def checksum(raw: Tensor | memoryview, each: Each) -> int:
    """Return the CRC-32C of flat bytes, computed in parallel."""
    size = len(raw)
    if size <= _CHUNK:
        return _core.crc32c(raw)
    return _combine_checksums(lambda begin, end: _core.crc32c(raw[begin:end]), size, each)


def copy_bytes(source: memoryview, target: Tensor, each: Each) -> int:
    """Copy flat bytes in parallel and return their CRC-32C."""
    to, data = target.numpy(), np.frombuffer(source, dtype=np.uint8)

    def copy_chunk(begin: int, end: int) -> int:
        np.copyto(to[begin:end], data[begin:end])  # torch would start threads of its own
        return _core.crc32c(to[begin:end])

    return _combine_checksums(copy_chunk, len(source), each)


def _combine_checksums(work: Callable[[int, int], int], size: int, each: Each) -> int:
    spans = [(begin, min(begin + _CHUNK, size)) for begin in range(0, size, _CHUNK)]
    total = 0
    for (begin, end), found in zip(spans, each(lambda i: work(*spans[i]), len(spans)), strict=True):
        total = _core.crc32c_join(total, found, end - begin)
    return total


@dataclass(frozen=True)
class FileManifest:
    """How the tensors of one file are stored: one line of JSON in the metadata of its header."""

    dialect: str
    checksums: Sequence[int | None]
    """CRC-32C of each entry in the header's order; None for blobs, which contain their own."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Alias -> name under which the tensor is stored."""
    plans: Mapping[str, str] = field(default_factory=dict)
    """Codecs of the tensors that are stored in several entries."""

    tree: Json | None = None
    """Outline of the values that are not tensors (`slimtensors.archive.tree`)."""
    delta: Mapping[str, Any] | None = None
    """How tensors differ from a base (`slimtensors.archive.delta`)."""
    generation: str | None = None
    """Hash that all shards of one model share, so that shards of two saves are never mixed."""
    source: Mapping[str, Any] | None = None
    """Header bytes of the files that were compressed, to restore them byte for byte."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name -> name of the stored tensor with the same bits; each has memory of its own."""

    @property
    def version(self) -> int:
        """The lowest format version that describes this manifest."""
        delta = self.delta or {}
        kinds = {entry[0] for entry in delta.get("tensors", {}).values()}
        if "names" in delta or not kinds.isdisjoint(CHANGE_KINDS):
            return 4
        outline = 1 if self.tree is None else outline_version(self.tree)
        has_new_keys = self.generation is not None or self.source is not None or bool(self.copies)
        return max(outline, 2) if has_new_keys or "copies" in delta else outline

    def to_text(self, table: str) -> str:
        """Return the JSON line; `table` is the list of tensors that follows it in the header."""
        raw = table.encode()
        data: dict[str, Any] = {"version": self.version, "dialect": self.dialect}
        if self.plans:
            data["plans"] = dict(self.plans)
        if self.tied:
            data["tied"] = dict(self.tied)
        if self.copies:
            data["copies"] = dict(self.copies)
        if self.tree is not None:
            data["tree"] = self.tree
        if self.delta is not None:
            data["delta"] = dict(self.delta)
        if self.generation is not None:
            data["generation"] = self.generation
        if self.source is not None:
            data["source"] = dict(self.source)
        data["checksums"] = list(self.checksums)
        data["table"] = [len(raw), _core.crc32c(raw)]
        body = json.dumps(data, separators=(",", ":"), ensure_ascii=False)[:-1]
        return f"{body}{_SEAL}{_core.crc32c(body.encode())}}}"

    @classmethod
    def from_text(cls, text: str, header: bytes) -> "FileManifest":
        """Parse the line; raise if it or the `header` that contains it was changed."""
        data = _parse_manifest(text)
        checksums, tied, plans = data["checksums"], data.get("tied", {}), data.get("plans", {})
        tree, delta, source = data.get("tree"), data.get("delta"), data.get("source")
        generation, copies = data.get("generation"), data.get("copies", {})
        if not isinstance(checksums, list) or not all(map(_is_checksum, checksums)):
            raise CorruptFileError("malformed manifest: invalid checksums")
        if not all(map(_is_string_table, (tied, plans, copies))):
            raise CorruptFileError("malformed manifest: invalid tied names, plans or copies")
        if not all(part is None or isinstance(part, dict) for part in (tree, delta, source)):
            raise CorruptFileError("malformed manifest: tree, delta and source must be objects")
        if not (generation is None or isinstance(generation, str)):
            raise CorruptFileError("malformed manifest: generation must be a string")
        match data["table"]:
            case [int(size), int(found)] if _core.crc32c(header[-size:]) == found:
                dialect = str(data["dialect"])
                return cls(dialect, checksums, tied, plans, tree, delta, generation, source, copies)
        raise CorruptFileError(
            "the list of tensors does not match the manifest: the file is damaged, or another"
            f" program rewrote it and kept the metadata key {KEY!r}"
        )


def is_sealed(text: str) -> bool:
    """Return True if `text` ends with its own checksum, as manifests do."""
    body, _, seal = text.rpartition(_SEAL)
    return bool(body) and seal == f"{_core.crc32c(body.encode(errors='surrogatepass'))}}}"


def is_damaged_manifest(key: str, text: str) -> bool:
    """Return True if this is a manifest under another key, or has nearly the key of one."""
    is_manifest = is_sealed(text) or all(word in text for word in (_SEAL, '"dialect":'))
    return key != KEY and (is_manifest or bool(get_close_matches(key, [KEY], cutoff=0.8)))


def check_version(version: int, newest: int) -> None:
    """Raise if a manifest or blob was written in a newer format version."""
    if version > newest:
        raise UnsupportedVersionError(
            f"format version {version} is newer than the supported version {newest};"
            " upgrade slimtensors"
        )


def _parse_manifest(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
        sealed = is_sealed(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the manifest is not valid JSON: {error}") from error
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise CorruptFileError("malformed manifest: missing or invalid version")
    check_version(version, VERSION)
    if not sealed or not {"dialect", "checksums", "table"} <= data.keys():
        raise CorruptFileError("checksum mismatch in the manifest: the file is damaged")
    return cast(dict[str, Any], data)


def _is_checksum(number: object) -> bool:
    return number is None or (type(number) is int and 0 <= number < 1 << 32)


def _is_string_table(table: object) -> bool:
    if not isinstance(table, dict) or not all(isinstance(word, str) for word in table.values()):
        return False
    return is_valid_text("".join((*table, *table.values())))
