"""Entropy coding of any tensor: each item as a bin, modelled by row and column, and an offset.

Smaller than `huffman` and slower: it models all bits of floats that are not random.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, scale_slice, serially, split_chunks
from slimtensors.tensor import (
    Parts,
    Spec,
    allocate,
    as_bytes,
    ceil_div,
    concatenate,
    empty_bytes,
)

_CHUNK = _core.BINS_CHUNK
_GROUP = 8
"""Chunks per piece of work: enough to amortize unpacking the model."""
_HEAD = struct.Struct("<I")
_ROW = 8
"""Bytes of a chunk's table row: its size and its checksum."""
_WIDTHS = range(8, 1 << 20)
_BLOCK = 256
"""Items that share a scale in a one-dimensional tensor."""


@register
@dataclass(frozen=True)
class Bins:
    """Code floats and integers by their magnitude and that of their neighbours. Lossless.

    A number is coded as a bin, entropy-coded by its frequency, and an offset in plain bits.
    Rows and columns of similar scale share their frequencies.
    """

    name: ClassVar[str] = "bins"
    part_names: ClassVar[tuple[str, ...]] = ("stream",)

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `stream`: one model for all chunks, then the independently coded chunks."""
        kind = _kind(x.dtype)
        items = as_bytes(x)
        widths = _widths(x, kind)
        count = items.numel() // kind.size
        labels = empty_bytes(ceil_div(count, min(widths, default=count or 1)))
        model = empty_bytes(_core.bins_model_bound(widths))
        model = model[: _core.bins_fit(items, kind.options, widths, labels, model)]
        chunks = ceil_div(count, _CHUNK)
        groups = split_chunks(chunks, _GROUP)
        rows = empty_bytes(_ROW * chunks)

        def encode_group(i: int) -> Tensor:
            group = groups[i]
            piece = items[scale_slice(group, _CHUNK * kind.size)]
            data = allocate(Spec(torch.uint8, (piece.numel(),)))
            first = group.start * _CHUNK
            row = rows[scale_slice(group, _ROW)]
            used = _core.bins_encode(piece, kind.options, first, labels, model, row, data)
            return data[:used]

        pieces = each(encode_group, len(groups))
        if sum(piece.numel() for piece in pieces) + model.numel() > items.numel():
            model, pieces = model[:0], [items]
            _core.bins_encode(
                items, kind.options, 0, labels, model, rows, empty_bytes(items.numel())
            )
        head = np.frombuffer(_HEAD.pack(model.numel()), np.uint8)
        return {"stream": concatenate([torch.from_numpy(head.copy()), model, rows, *pieces])}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Decode every chunk and compare its checksum."""
        stream = _Stream.parse(parts, like)
        out = allocate(like)
        stream.decode_all(out, each)
        return out

    def decode_into(self, parts: Parts, out: Tensor, each: Each = serially) -> None:
        """Decode into the memory of `out`."""
        _Stream.parse(parts, Spec.of(out)).decode_all(out, each)

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor, decoding only their chunks."""
        if not 0 <= begin <= end <= like.numel:
            raise IndexError(f"items {begin} to {end} are out of range for {like.numel} items")
        if begin == end:
            return torch.empty(0, dtype=like.dtype)
        stream = _Stream.parse(parts, like)
        step = _CHUNK * stream.itemsize // like.dtype.itemsize  # a complex number is two items
        group = slice(begin // step, ceil_div(end, step))
        first, last = group.start * step, min(group.stop * step, like.numel)
        out = allocate(Spec(like.dtype, (last - first,)))
        stream.decode(group, stream.locate([slice(0, group.start), group])[1], as_bytes(out))
        return out[begin - first : end - first]


@dataclass(frozen=True)
class _Kind:
    """A dtype for the C++ core: items of 1, 2, 4 or 8 bytes, floats by their exponents."""

    size: int
    exponent_bits: int
    is_signed: bool

    @property
    def options(self) -> _core.ItemType:
        return _core.ItemType(
            itemsize=self.size, exponent_bits=self.exponent_bits, is_signed=self.is_signed
        )


_EXPONENT_BITS = {8: 11, 4: 8, 2: 5}
_SMALL_EXPONENT_BITS = {
    "float8_e4m3fn": 4,
    "float8_e4m3fnuz": 4,
    "float8_e5m2": 5,
    "float8_e5m2fnuz": 5,
}


@cache
def _kind(dtype: torch.dtype) -> _Kind:
    if dtype is torch.bfloat16:
        return _Kind(2, 8, is_signed=True)
    if dtype.is_complex or (dtype.is_floating_point and dtype.itemsize > 1):
        size = dtype.itemsize // (2 if dtype.is_complex else 1)
        return _Kind(size, _EXPONENT_BITS[size], is_signed=True)
    name = str(dtype).removeprefix("torch.")
    if name in _SMALL_EXPONENT_BITS:
        return _Kind(1, _SMALL_EXPONENT_BITS[name], is_signed=True)
    return _Kind(dtype.itemsize, 0, is_signed=name in {"int8", "int16", "int32", "int64"})


def _widths(x: Tensor, kind: _Kind) -> list[int]:
    """Return the candidate row lengths: all but the first dimension, and the last one."""
    per_element = x.element_size() // kind.size
    shape = [n for n in x.shape if n != 1]
    rows = {math.prod(shape[1:]), shape[-1]} if len(shape) > 1 else {_BLOCK}
    return sorted(n * per_element for n in rows if n * per_element in _WIDTHS)


@dataclass(frozen=True)
class _Stream:
    """The parsed stream of a tensor; only sizes are checked."""

    itemsize: int
    model: Tensor
    rows: Tensor
    data: Tensor

    @classmethod
    def parse(cls, parts: Parts, like: Spec) -> "_Stream":
        stream = parts["stream"]
        if stream.dtype is not torch.uint8 or stream.dim() != 1:
            raise CorruptFileError("the stream of bins is not a flat uint8 tensor")
        stream = as_bytes(stream)
        kind = _kind(like.dtype)
        chunks = ceil_div(like.nbytes, _CHUNK * kind.size)
        if stream.numel() < _HEAD.size + _ROW * chunks:
            raise CorruptFileError(
                f"stream of {stream.numel()} bytes is too short for {chunks} chunks"
            )
        (size,) = _HEAD.unpack(bytes(stream[: _HEAD.size].numpy()))
        model, rest = stream[_HEAD.size :][:size], stream[_HEAD.size + size :]
        if model.numel() != size or rest.numel() < _ROW * chunks:
            raise CorruptFileError(
                f"stream of {stream.numel()} bytes is too short for a model of {size} bytes"
            )
        return cls(kind.size, model, rest[: _ROW * chunks], rest[_ROW * chunks :])

    @property
    def chunks(self) -> int:
        return self.rows.numel() // _ROW

    def locate(self, groups: Sequence[slice]) -> list[slice]:
        """Return the byte range in `data` of consecutive groups, the first of which starts at 0."""
        sizes = np.frombuffer(bytes(self.rows.numpy()), "<u4").reshape(-1, 2)[:, 0]
        ends = accumulate((int(sizes[group].sum(dtype=np.int64)) for group in groups), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def decode_all(self, out: Tensor, each: Each) -> None:
        """Decode all chunks, in groups."""
        groups = split_chunks(self.chunks, _GROUP)
        ranges = self.locate(groups)
        size = ranges[-1].stop if ranges else 0
        if size != self.data.numel():
            raise CorruptFileError(f"expected {size} bytes of chunks, got {self.data.numel()}")
        items = as_bytes(out)

        def decode_group(i: int) -> None:
            group = groups[i]
            self.decode(group, ranges[i], items[scale_slice(group, _CHUNK * self.itemsize)])

        each(decode_group, len(groups))

    def decode(self, chunks: slice, at: slice, items: Tensor) -> None:
        """Decode consecutive chunks, stored in the byte range `at`."""
        rows, data = self.rows[scale_slice(chunks, _ROW)], self.data[at]
        try:
            _core.bins_decode(rows, data, self.itemsize, chunks.start * _CHUNK, self.model, items)
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
