"""The dialect `slim`: each compressed tensor is one self-describing blob under its own name.

A blob is a flat `uint8` tensor: magic, version, header length, checksum, JSON header, parts. A
loader that does not know it stops at the shape instead of running on wrong numbers.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.archive.dialects.manifest import VERSION
from slimtensors.archive.dialects.member import (
    Member,
    PackedTensor,
    PlainMember,
    StoredEntry,
    TensorInfo,
    checksum,
    plain_tensor_bytes,
)
from slimtensors.codecs import Dense, TorchQuantized
from slimtensors.codecs.plan import (
    Encoded,
    Plan,
    decode,
    describe,
    encode_measured,
    max_decoded,
    parse_plan,
    parse_sizes,
    rebuild,
)
from slimtensors.errors import CorruptFileError, UnsupportedVersionError
from slimtensors.parallel import Each
from slimtensors.storage import ByteChunk, HeaderEntry, StoredFile, TensorBytes, has_code
from slimtensors.tensor import QUANTIZED_DTYPES, Json, Spec, as_bytes, ceil_div, view_as

NAME = "slim"
MAGIC = b"SLIM"
_START = struct.Struct("<4sIII")
"""Magic, version, bytes of the JSON header, CRC-32C of these twelve bytes and the JSON header."""
_ALIGN = 16
"""Blobs and their parts take multiples of it, so that parts of every dtype lie aligned."""


@dataclass(frozen=True, slots=True)
class BlobMember:
    """A tensor stored as one blob."""

    file: StoredFile
    entry: HeaderEntry

    @property
    def stored_bytes(self) -> int:
        """The whole blob."""
        return self.entry.end - self.entry.begin

    def spec(self) -> Spec:
        """Return what the blob's header says."""
        return Spec.from_json(self._header())

    def about(self) -> TensorInfo:
        """Return what the blob's header says."""
        header = self._header()
        error = header.get("error")
        measured = float(error) if isinstance(error, int | float) else None
        parts = _with_header(parse_sizes(header), self.stored_bytes)
        return TensorInfo(Spec.from_json(header), parse_plan(header), parts, measured)

    def load(self, each: Each) -> Tensor:
        """Check and decode the blob."""
        out = decode(self.encoded(each), each)
        self.file.release(self.entry)
        return out

    def load_exact(self, each: Each) -> list[Tensor]:
        """Decode the blob, but for rounding that came first."""
        encoded = self.encoded(each)
        is_rounded = encoded.plan.is_lossy or encoded.spec.dtype in QUANTIZED_DTYPES
        exact = encoded.parts.values() if is_rounded else [encoded]
        out = [decode(x, each) if isinstance(x, Encoded) else x.clone() for x in exact]
        self.file.release(self.entry)
        return out

    def encoded(self, each: Each) -> Encoded:
        """Check the blob, and return its parts as they lie in the file."""
        raw = self.file.read(self.entry)
        start, header = unpack_header(raw)
        payload = raw[start:]
        if checksum(payload, each) != header.get("crc32c"):
            raise CorruptFileError("the checksum differs: the file is damaged")
        return rebuild(header, payload)

    def packed(self, name: str) -> PackedTensor:
        """Return the blob as it is, to be written to another file."""
        about, raw = self.about(), self.file.read(self.entry)
        piece = TensorBytes(name, self.entry.spec, [view_as(raw, self.entry.spec)], None)
        return PackedTensor([piece], about.plan, about.error)

    def _header(self) -> Json:
        start = bytes(self.file.read(self.entry, _START.size))
        size = _START.unpack(start)[2] if len(start) == _START.size else 0
        return unpack_header(self.file.read(self.entry, _START.size + size))[1]


def check(name: str, spec: Spec) -> None:
    """Do nothing: a blob can hold every dtype."""


def pack_tensor(name: str, x: Tensor, plan: Plan | None, each: Each) -> PackedTensor:
    """Return `x` as it goes into a file."""
    if plan is None:
        if has_code(Spec.of(x)) and not _looks_like_blob(x):
            return PackedTensor([plain_tensor_bytes(name, x, each)], None, parts={"data": x.nbytes})
        # What safetensors cannot say, or what would be taken for a blob.
        plan = Plan(TorchQuantized() if x.is_quantized else Dense())
    stored, error = encode_measured(plan, x, each)
    return _packed(name, stored, each, error)


def encoded(name: str, x: Encoded, each: Each) -> PackedTensor:
    """Return an encoded tensor as it goes into a file; how much it lost is not known any more."""
    return _packed(name, x, each)


def _packed(name: str, x: Encoded, each: Each, error: float | None = None) -> PackedTensor:
    chunks = pack(x, each, error)
    size = sum(len(chunk) for chunk in chunks)
    parts = _with_header({path: leaf.nbytes for path, leaf in x.leaves()}, size)
    return PackedTensor(
        [TensorBytes(name, Spec(torch.uint8, (size,)), chunks, None)], x.plan, error, parts
    )


def _with_header(parts: dict[str, int], total: int) -> dict[str, int]:
    """Return the parts of a blob, and what describes and aligns them."""
    return {**parts, "header": total - sum(parts.values())}


def _looks_like_blob(x: Tensor) -> bool:
    return is_blob(Spec.of(x), lambda size: x[:size].contiguous().numpy().data)


def as_member(stored: StoredEntry, *, blob: bool | None) -> Member:
    """Return what is stored as a tensor; where it is not known to be a `blob`, it tells itself."""
    if blob is None:
        spec = stored.entry.spec
        blob = is_blob(spec, lambda size: stored.file.read(stored.entry, size))
    return BlobMember(stored.file, stored.entry) if blob else PlainMember(stored)


def pack(encoded: Encoded, each: Each, error: float | None = None) -> list[ByteChunk]:
    """Return the chunks that make up the blob of an encoded tensor."""
    body: list[ByteChunk] = []
    at: dict[str, tuple[int, int]] = {}
    end, seal = 0, 0
    for path, leaf in encoded.leaves():
        raw = as_bytes(leaf)
        padding = bytes(-raw.numel() % _ALIGN)
        seal = _core.crc32c_join(seal, checksum(raw, each), raw.numel())
        seal = _core.crc32c(padding, seal)
        body += [raw, padding]
        at[path] = end, end + raw.numel()
        end += raw.numel() + len(padding)
    while encoded.spec.nbytes > max_decoded(end):
        padding = bytes(_ALIGN * 64)
        seal = _core.crc32c(padding, seal)
        body.append(padding)
        end += len(padding)
    header = {**describe(encoded, at), "crc32c": seal}
    if error is not None:
        header["error"] = error
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(ceil_div(len(text), _ALIGN) * _ALIGN)
    if encoded.spec.shape == (_START.size + len(text) + end,):
        text += b" " * _ALIGN  # a loader that does not know us must find another shape
    start = _START.pack(MAGIC, VERSION, len(text), 0)[:12]
    return [start, _core.crc32c(text, _core.crc32c(start)).to_bytes(4, "little"), text, *body]


def unpack_header(raw: memoryview) -> tuple[int, Json]:
    """Return where the parts of a blob start, and its header, checked against its checksum."""
    if len(raw) < _START.size:
        raise CorruptFileError(f"{len(raw)} bytes are too few for a compressed tensor")
    start = bytes(raw[: _START.size])
    magic, version, size, seal = _START.unpack(start)
    if magic != MAGIC:
        raise CorruptFileError("a compressed tensor must start with 'SLIM'")
    if version < 1:
        raise CorruptFileError("a compressed tensor of version 0, which never was")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"stored in format version {version}, this library reads up to {VERSION};"
            " upgrade slimtensors"
        )
    end = _START.size + size
    text = bytes(raw[_START.size : end])
    if len(text) != size or _core.crc32c(text, _core.crc32c(start[:12])) != seal:
        raise CorruptFileError("the header's checksum differs: the file is damaged")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptFileError("the header is not a table")
    return end, header


def is_blob(spec: Spec, first: Callable[[int], memoryview]) -> bool:
    """Tell whether a tensor is one of our blobs; `first` returns its first bytes."""
    if spec.dtype is not torch.uint8 or len(spec.shape) != 1 or spec.shape[0] < _START.size:
        return False
    magic, _, size, seal = _START.unpack(first(_START.size))
    if magic != MAGIC:
        return False
    raw = first(_START.size + size)
    return bool(_core.crc32c(raw[_START.size :], _core.crc32c(raw[:12])) == seal)
