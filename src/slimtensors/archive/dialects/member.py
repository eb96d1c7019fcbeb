"""A tensor inside an archive, as dialects find it; and the simplest kind, a plain one."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.plan import Plan
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each
from slimtensors.storage import HeaderEntry, StoredFile, TensorBytes
from slimtensors.tensor import Spec, allocate, as_bytes, view_as

_CHUNK = 1 << 20
_SMALL = 32 << 10  # torch copies more than that with threads of its own


class Member(Protocol):
    """One tensor of an archive: described at once, read when asked for."""

    @property
    def file(self) -> StoredFile:
        """Where it lies."""
        ...

    @property
    def stored_bytes(self) -> int:
        """What it costs in the file."""
        ...

    def spec(self) -> Spec:
        """Return dtype and shape of the tensor."""
        ...

    def about(self) -> "TensorInfo":
        """Return how it is stored, at the cost of one look at it."""
        ...

    def load(self, each: Each) -> Tensor:
        """Read, check and decode it into memory of its own."""
        ...

    def load_exact(self, each: Each) -> list[Tensor]:
        """Read what is stored exactly: the tensor, or the integers and scales it is made of."""
        ...


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What can be said of a stored tensor without decoding it."""

    spec: Spec
    plan: Plan | None
    """None if plain."""
    parts: Mapping[str, int]
    """Bytes of everything it is stored as; together those that it costs in the file."""
    error: float | None = None
    """How far it is from what was given, relative RMS; none if it is the same."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor ready to be written."""

    pieces: Sequence[TensorBytes]
    plan: Plan | None
    """By which it was packed; none if plain."""
    error: float | None = None
    """What that cost, relative RMS; none if nothing."""
    parts: Mapping[str, int] = field(default_factory=dict)
    """Bytes of everything it is stored as."""
    is_one_tensor: bool = True
    """Whether readers find it under its name; otherwise they find the pieces."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    """A tensor as it lies in a file, before anybody asks what it means."""

    file: StoredFile
    entry: HeaderEntry
    checksum: int | None
    """Of its bytes; none where nobody recorded one."""

    def read(self, each: Each) -> Tensor:
        """Return its data, checked and valid until it is released."""
        raw = self.file.read(self.entry)
        if self.checksum is not None:
            self.check(checksum(raw, each))
        return view_as(raw, self.entry.spec)

    def check(self, found: int) -> None:
        """Raise if its bytes have another checksum than when they were written."""
        if self.checksum is not None and found != self.checksum:
            raise CorruptFileError("the checksum differs: the file is damaged")


@dataclass(frozen=True, slots=True)
class PlainMember:
    """A tensor that safetensors itself describes."""

    stored: StoredEntry

    @property
    def file(self) -> StoredFile:
        """Where it lies."""
        return self.stored.file

    @property
    def stored_bytes(self) -> int:
        """As many bytes as it has in memory."""
        return self.stored.entry.spec.nbytes

    def spec(self) -> Spec:
        """Return what the header says."""
        return self.stored.entry.spec

    def about(self) -> TensorInfo:
        """Return that there is nothing to decode."""
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
            stored.check(copy_tensor(raw, as_bytes(out), each))
        stored.file.release(entry)
        return out

    def load_exact(self, each: Each) -> list[Tensor]:
        """Return the tensor."""
        return [self.load(each)]

    @property
    def has_rows(self) -> bool:
        """Whether rows can be read by themselves: a checksum would be that of all."""
        return self.stored.checksum is None and len(self.spec().shape) > 1

    def load_rows(self, begin: int, end: int) -> Tensor:
        """Copy some rows."""
        spec, entry = self.spec(), self.stored.entry
        width = spec.nbytes // spec.shape[0]
        raw = self.file.read_part(entry, begin * width, end * width)
        rows = view_as(raw, Spec(spec.dtype, (end - begin, *spec.shape[1:]))).clone()
        self.file.release_part(entry, begin * width, end * width)
        return rows


def plain_tensor_bytes(name: str, x: Tensor, each: Each) -> TensorBytes:
    """Return `x` as safetensors itself stores it."""
    raw = as_bytes(x)
    return TensorBytes(name, Spec.of(x), [raw], checksum(raw, each))


def checksum(raw: Tensor | memoryview, each: Each) -> int:
    """Return the CRC-32C of flat bytes, dividing the work."""
    size = len(raw)
    if size <= _CHUNK:
        return _core.crc32c(raw)
    return _joined(lambda begin, end: _core.crc32c(raw[begin:end]), size, each)


def copy_tensor(source: memoryview, target: Tensor, each: Each) -> int:
    """Copy flat bytes, dividing the work, and return their CRC-32C."""
    to, given = target.numpy(), np.frombuffer(source, dtype=np.uint8)

    def one(begin: int, end: int) -> int:
        np.copyto(to[begin:end], given[begin:end])  # torch would start threads of its own
        return _core.crc32c(to[begin:end])

    return _joined(one, len(source), each)


def _joined(work: Callable[[int, int], int], size: int, each: Each) -> int:
    spans = [(begin, min(begin + _CHUNK, size)) for begin in range(0, size, _CHUNK)]
    total = 0
    for (begin, end), found in zip(spans, each(lambda i: work(*spans[i]), len(spans)), strict=True):
        total = _core.crc32c_join(total, found, end - begin)
    return total
