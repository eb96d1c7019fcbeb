"""Arithmetic coding of masks, modelled by the density of rows and columns."""

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    Parts,
    Spec,
    allocate,
    as_bytes,
    ceil_div,
    concatenate,
    empty_bytes,
)

_CHUNK = 1 << 18
_NARROWEST, _WIDEST = 16, 1 << 15
_DEFAULT_WIDTH = 128
_PAIRS = 256
_HEAD = struct.Struct("<I")
_ENTRY = struct.Struct("<II")


@register
@dataclass(frozen=True)
class Density:
    """Code the bits of a mask by the density of its rows and columns. Lossless; small, slow.

    Rows and columns are divided into up to 16 classes each, and the bits are coded arithmetically
    with the density of their pair of classes. For masks of any density, such as that of `bitmask`.
    """

    name: ClassVar[str] = "density"
    part_names: ClassVar[tuple[str, ...]] = ("stream",)

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `stream`: the classes, then the independently coded chunks."""
        mask = as_bytes(x)
        layout = _Layout.of(Spec.of(x))
        rows, columns, probabilities = layout.allocate_model()
        _core.density_fit(mask, rows, columns, probabilities)
        model = empty_bytes(_core.density_model_bound(len(rows) + len(columns)))
        model = model[: _core.density_pack(rows, columns, probabilities, model)]

        def encode_chunk(i: int) -> Tensor:
            piece = mask[layout.bytes_of(i)]
            coded = empty_bytes(piece.numel())
            labels = rows[layout.rows_of(i)]
            return coded[: _core.density_encode(piece, labels, columns, probabilities, coded)]

        pieces = each(encode_chunk, layout.chunks)
        entries = [
            _ENTRY.pack(piece.numel(), _core.crc32c(mask[layout.bytes_of(i)]))
            for i, piece in enumerate(pieces)
        ]
        head = _HEAD.pack(model.numel()) + bytes(model.numpy()) + b"".join(entries)
        return {
            "stream": concatenate([torch.frombuffer(bytearray(head), dtype=torch.uint8), *pieces])
        }

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Decode every chunk and compare its checksum."""
        stream = parts["stream"]
        if stream.dtype is not torch.uint8 or stream.dim() != 1:
            raise CorruptFileError("the density stream is not a flat uint8 tensor")
        layout = _Layout.of(like)
        model, entries, data = _split(stream, layout.chunks)
        ends = list(accumulate((size for size, _ in entries), initial=0))
        if ends[-1] != data.numel():
            raise CorruptFileError(f"expected {ends[-1]} bytes of chunks, got {data.numel()}")
        ranges = list(pairwise(ends))
        rows, columns, probabilities = layout.allocate_model()
        out = allocate(like)
        mask = as_bytes(out)

        def decode_chunk(i: int) -> None:
            begin, end = ranges[i]
            piece = mask[layout.bytes_of(i)]
            labels = rows[layout.rows_of(i)]
            _core.density_decode(data[begin:end], labels, columns, probabilities, piece)
            if _core.crc32c(piece) != entries[i][1]:
                raise CorruptFileError(f"chunk {i} of the mask does not match its checksum")

        try:
            _core.density_unpack(model, rows, columns, probabilities)
            each(decode_chunk, layout.chunks)
        except CorruptFileError:
            raise
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
        return out


@dataclass(frozen=True)
class _Layout:
    """Division of bytes into rows, and of rows into chunks; depends on the shape only."""

    nbytes: int
    width: int
    rows: int
    rows_per_chunk: int
    chunks: int

    @classmethod
    def of(cls, spec: Spec) -> "_Layout":
        width = spec.shape[-1] * spec.dtype.itemsize if len(spec.shape) > 1 else 0
        if not _NARROWEST <= width <= _WIDEST:
            width = _DEFAULT_WIDTH
        rows = ceil_div(spec.nbytes, width)
        per_chunk = ceil_div(rows, max(ceil_div(spec.nbytes, _CHUNK), 1))
        return cls(spec.nbytes, width, rows, per_chunk, ceil_div(rows, per_chunk) if rows else 0)

    def allocate_model(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return buffers for the row classes, the column classes, and their probabilities."""
        return empty_bytes(self.rows), empty_bytes(8 * self.width), empty_bytes(_PAIRS)

    def rows_of(self, chunk: int) -> slice:
        return slice(chunk * self.rows_per_chunk, (chunk + 1) * self.rows_per_chunk)

    def bytes_of(self, chunk: int) -> slice:
        rows = self.rows_of(chunk)
        return slice(rows.start * self.width, rows.stop * self.width)


def _split(stream: Tensor, chunks: int) -> tuple[Tensor, list[tuple[int, int]], Tensor]:
    raw = stream.numpy().data
    try:
        (size,) = _HEAD.unpack_from(raw)
        start = _HEAD.size + size
        entries = [_ENTRY.unpack_from(raw, start + i * _ENTRY.size) for i in range(chunks)]
    except struct.error as error:
        raise CorruptFileError(f"density stream of {len(raw)} bytes is too short") from error
    end = start + chunks * _ENTRY.size
    return stream[_HEAD.size : start], entries, stream[end:]
