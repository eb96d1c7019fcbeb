"""The dialect `slim`: each compressed tensor is one self-describing blob under its own name.

A blob is a flat `uint8` tensor: magic, version, header length, checksum, JSON header, parts.
Loaders that do not support it fail on the shape instead of running on wrong values.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.archive.dialects.entries import (
    Member,
    PackedTensor,
    PlainMember,
    StoredEntry,
    TensorInfo,
    check_version,
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
    least_stored,
    parse_plan,
    parse_sizes,
    rebuild,
)
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each
from slimtensors.storage import ByteChunk, HeaderEntry, StoredFile, TensorBytes, has_code
from slimtensors.tensor import QUANTIZED_DTYPES, Json, Spec, as_bytes, ceil_div, view_as

NAME = "slim"
VERSION = 1
"""Format version of blobs."""
MAGIC = b"SLIM"
_START = struct.Struct("<4sIII")
"""Magic, version, bytes of the JSON header, CRC-32C of these twelve bytes and the JSON header."""
_ALIGN = 16
"""Alignment of blobs and their parts, enough for every dtype."""


@dataclass(frozen=True, slots=True)
class BlobMember:
    """A tensor stored as one blob."""

    file: StoredFile
    entry: HeaderEntry

    @property
    def stored_bytes(self) -> int:
        """Bytes of the blob."""
        return self.entry.end - self.entry.begin

    def spec(self) -> Spec:
        """Return dtype and shape from the header of the blob."""
        return Spec.from_json(self._header())

    def info(self) -> TensorInfo:
        """Return how it is stored, from the header of the blob."""
        header = self._header()
        error = header.get("error")
        measured = float(error) if isinstance(error, int | float) else None
        parts = _add_header(parse_sizes(header), self.stored_bytes)
        return TensorInfo(Spec.from_json(header), parse_plan(header), parts, measured)

    def load(self, each: Each) -> Tensor:
        """Check and decode the blob."""
        out = decode(self.read_encoded(each), each)
        self.file.release(self.entry)
        return out

    def load_exact(self, each: Each) -> list[Tensor]:
        """Decode the losslessly coded parts: the tensor, or its integers and scales."""
        encoded = self.read_encoded(each)
        is_rounded = encoded.plan.is_lossy or encoded.spec.dtype in QUANTIZED_DTYPES
        exact = encoded.parts.values() if is_rounded else [encoded]
        out = [decode(x, each) if isinstance(x, Encoded) else x.clone() for x in exact]
        self.file.release(self.entry)
        return out

    def read_encoded(self, each: Each) -> Encoded:
        """Check the blob and return its parts, mapped from the file."""
        return parse_blob(self.file.read(self.entry), each)

    def read_packed(self, name: str) -> PackedTensor:
        """Return the blob unchanged, to be written to another file."""
        info, raw = self.info(), self.file.read(self.entry)
        piece = TensorBytes(name, self.entry.spec, [view_as(raw, self.entry.spec)], None)
        return PackedTensor([piece], info.plan, info.error)

    def _header(self) -> Json:
        start = bytes(self.file.read(self.entry, _START.size))
        size = _START.unpack(start)[2] if len(start) == _START.size else 0
        return parse_header(self.file.read(self.entry, _START.size + size))[1]


def check(name: str, spec: Spec) -> None:
    """Do nothing: blobs support every dtype."""


def pack(name: str, x: Tensor, plan: Plan | None, each: Each) -> PackedTensor:
    """Return the entry of `x`: plain, or a blob."""
    if plan is None:
        if has_code(Spec.of(x)) and not _looks_like_blob(x):
            return PackedTensor([plain_tensor_bytes(name, x, each)], None, parts={"data": x.nbytes})
        # Not supported by safetensors, or looks like a blob.
        plan = Plan(TorchQuantized() if x.is_quantized else Dense())
    encoded, error = encode_measured(plan, x, each)
    return pack_encoded(name, encoded, each, error)


def pack_encoded(name: str, x: Encoded, each: Each, error: float | None = None) -> PackedTensor:
    """Return the blob of an encoded tensor; `error` is its relative RMS error, if measured."""
    chunks = make_blob(x, each, error)
    size = sum(len(chunk) for chunk in chunks)
    parts = _add_header({path: leaf.nbytes for path, leaf in x.leaves()}, size)
    return PackedTensor(
        [TensorBytes(name, Spec(torch.uint8, (size,)), chunks, None)], x.plan, error, parts
    )


def pack_pieces(packed: PackedTensor, choose: Chooser, each: Each) -> PackedTensor:
    """Return a tensor stored in several plain entries with blobs for those that get smaller."""
    pieces = [_pack_piece(piece, choose, each) for piece in packed.pieces]
    return replace(packed, pieces=pieces)


def _pack_piece(piece: TensorBytes, choose: Chooser, each: Each) -> TensorBytes:
    (raw,) = piece.chunks
    assert isinstance(raw, Tensor), "plain entries are tensors"
    x = raw.view(piece.spec.dtype).view(piece.spec.shape)
    choice = choose(piece.name, x) if x.numel() else None
    plan = choice.plan if isinstance(choice, Choice) else choice
    (coded,) = pack(piece.name, x, plan, each).pieces
    return coded if coded.spec.nbytes < piece.spec.nbytes else piece


def _add_header(parts: dict[str, int], total: int) -> dict[str, int]:
    """Return the sizes of the parts, and of the header with all padding."""
    return {**parts, "header": total - sum(parts.values())}


def _looks_like_blob(x: Tensor) -> bool:
    return is_blob(Spec.of(x), lambda size: x[:size].contiguous().numpy().data)


def make_member(stored: StoredEntry, *, blob: bool | None) -> Member:
    """Return the tensor of an entry; `blob=None`: look at its first bytes."""
    if blob is None:
        spec = stored.entry.spec
        blob = is_blob(spec, lambda size: stored.file.read(stored.entry, size))
    return BlobMember(stored.file, stored.entry) if blob else PlainMember(stored)


def make_blob(encoded: Encoded, each: Each, error: float | None = None) -> list[ByteChunk]:
    """Return the chunks of bytes of the blob of an encoded tensor."""
    body: list[ByteChunk] = []
    offsets: dict[str, tuple[int, int]] = {}
    end, seal = 0, 0
    for path, leaf in encoded.leaves():
        raw = as_bytes(leaf)
        padding = bytes(-raw.numel() % _ALIGN)
        seal = _core.crc32c_join(seal, checksum(raw, each), raw.numel())
        seal = _core.crc32c(padding, seal)
        body += [raw, padding]
        offsets[path] = end, end + raw.numel()
        end += raw.numel() + len(padding)
    least = least_stored(encoded)
    while end < least:
        padding = bytes(_ALIGN * 64)
        seal = _core.crc32c(padding, seal)
        body.append(padding)
        end += len(padding)
    header = {**describe(encoded, offsets), "crc32c": seal}
    if error is not None:
        header["error"] = error
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(ceil_div(len(text), _ALIGN) * _ALIGN)
    if encoded.spec.shape == (_START.size + len(text) + end,):
        text += b" " * _ALIGN  # loaders without support must see another shape
    start = _START.pack(MAGIC, VERSION, len(text), 0)[:12]
    return [start, _core.crc32c(text, _core.crc32c(start)).to_bytes(4, "little"), text, *body]


def parse_header(raw: memoryview) -> tuple[int, Json]:
    """Return the offset of the parts of a blob and its header; raise if its checksum differs."""
    if len(raw) < _START.size:
        raise CorruptFileError(f"truncated blob: {len(raw)} bytes, expected at least {_START.size}")
    start = bytes(raw[: _START.size])
    magic, version, size, seal = _START.unpack(start)
    if magic != MAGIC:
        raise CorruptFileError(f"invalid blob: starts with {magic!r}, expected {MAGIC!r}")
    if version < 1:
        raise CorruptFileError("invalid format version 0")
    check_version(version, VERSION)
    end = _START.size + size
    text = bytes(raw[_START.size : end])
    if len(text) != size or _core.crc32c(text, _core.crc32c(start[:12])) != seal:
        raise CorruptFileError("checksum mismatch in the header of the blob: the file is damaged")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header of the blob is not valid JSON: {error}") from error
    if not isinstance(header, dict):
        raise CorruptFileError("the header of the blob is not a JSON object")
    return end, header


def parse_blob(raw: memoryview, each: Each) -> Encoded:
    """Check a blob and return its parts, which share its memory."""
    start, header = parse_header(raw)
    payload = raw[start:]
    if checksum(payload, each) != header.get("crc32c"):
        raise CorruptFileError("checksum mismatch: the file is damaged")
    return rebuild(header, payload)


def is_blob(spec: Spec, first: Callable[[int], memoryview]) -> bool:
    """Return True if a tensor is a blob; `first` returns its first bytes."""
    if spec.dtype is not torch.uint8 or len(spec.shape) != 1 or spec.shape[0] < _START.size:
        return False
    magic, _, size, seal = _START.unpack(first(_START.size))
    if magic != MAGIC:
        return False
    raw = first(_START.size + size)
    return bool(_core.crc32c(raw[_START.size :], _core.crc32c(raw[:12])) == seal)
