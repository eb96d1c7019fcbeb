"""Any tensor: each item as a bin, in as few bits as bins of its row and column need, and the rest.

Smaller than `huffman` and slower: of floats it codes as many bits as tell anything.
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
from slimtensors.codecs.protocol import (
    chunk_groups,
    concatenate,
    empty_bytes,
    register,
    scale_slice,
)
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, allocate, as_bytes, ceil_div

_CHUNK = _core.BINS_CHUNK
_GROUP = 8
"""Chunks per piece of work: enough to be worth unpacking the model."""
_HEAD = struct.Struct("<I")
_ROW = 8
"""Bytes of a chunk's row: its size and its checksum."""
_WIDTHS = range(8, 1 << 20)
_BLOCK = 256
"""Items that share a scale where a tensor has only one dimension."""


@register
@dataclass(frozen=True)
class Bins:
    """Code floats and integers by how large they are, and how large others around them. Lossless.

    A number is a bin, whose frequency decides its bits, and its place in the bin, in plain bits.
    Items of rows and columns of a like scale share the frequencies.
    """

    name: ClassVar[str] = "bins"

    def encode(self, x: Tensor) -> Parts:
        """Return `stream`."""
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Check and decode every chunk."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Find one model for all chunks, then code these on their own."""
        kind = _kind(x.dtype)
        items = as_bytes(x)
        widths = _widths(x, kind)
        count = items.numel() // kind.size
        labels = empty_bytes(ceil_div(count, min(widths, default=count or 1)))
        model = empty_bytes(_core.bins_model_bound(widths))
        model = model[: _core.bins_fit(items, kind.known, widths, labels, model)]
        chunks = ceil_div(count, _CHUNK)
        groups = chunk_groups(chunks, _GROUP)
        rows = empty_bytes(_ROW * chunks)

        def one(i: int) -> Tensor:
            some = groups[i]
            piece = items[scale_slice(some, _CHUNK * kind.size)]
            data = allocate(Spec(torch.uint8, (piece.numel(),)))
            first = some.start * _CHUNK
            row = rows[scale_slice(some, _ROW)]
            used = _core.bins_encode(piece, kind.known, first, labels, model, row, data)
            return data[:used]

        pieces = each(one, len(groups))
        if sum(piece.numel() for piece in pieces) + model.numel() > items.numel():
            model, pieces = model[:0], [items]
            _core.bins_encode(items, kind.known, 0, labels, model, rows, empty_bytes(items.numel()))
        head = np.frombuffer(_HEAD.pack(model.numel()), np.uint8)
        return {"stream": concatenate([torch.from_numpy(head.copy()), model, rows, *pieces])}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Decode groups of chunks side by side."""
        stream = _Stream.of(parts, like)
        groups = chunk_groups(stream.chunks, _GROUP)
        places = stream.places(groups)
        size = places[-1].stop if places else 0
        if size != stream.data.numel():
            raise CorruptFileError(f"{stream.data.numel()} bytes of data, but chunks of {size}")
        out = allocate(like)
        items = as_bytes(out)

        def one(i: int) -> None:
            stream.decode(
                groups[i], places[i], items[scale_slice(groups[i], _CHUNK * stream.itemsize)]
            )

        each(one, len(groups))
        return out

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor, decoding only their chunks."""
        if not 0 <= begin <= end <= like.numel:
            raise IndexError(f"items {begin} to {end} of {like.numel}")
        if begin == end:
            return torch.empty(0, dtype=like.dtype)
        stream = _Stream.of(parts, like)
        step = _CHUNK * stream.itemsize // like.dtype.itemsize  # a complex number is two items
        some = slice(begin // step, ceil_div(end, step))
        first, last = some.start * step, min(some.stop * step, like.numel)
        out = allocate(Spec(like.dtype, (last - first,)))
        stream.decode(some, stream.places([slice(0, some.start), some])[1], as_bytes(out))
        return out[begin - first : end - first]


@dataclass(frozen=True)
class _Kind:
    """How the core sees a dtype: items of 1, 2, 4 or 8 bytes, floats by their exponents."""

    size: int
    exponent_bits: int
    is_signed: bool

    @property
    def known(self) -> _core.ItemType:
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
    """Return how many items rows could have: all of the first dimension, and of the last one."""
    per_element = x.element_size() // kind.size
    shape = [n for n in x.shape if n != 1]
    rows = {math.prod(shape[1:]), shape[-1]} if len(shape) > 1 else {_BLOCK}
    return sorted(n * per_element for n in rows if n * per_element in _WIDTHS)


@dataclass(frozen=True)
class _Stream:
    """The bytes of a tensor, taken apart and checked as far as their sizes go."""

    itemsize: int
    model: Tensor
    rows: Tensor
    data: Tensor

    @classmethod
    def of(cls, parts: Parts, like: Spec) -> "_Stream":
        stream = parts["stream"]
        if stream.dtype is not torch.uint8 or stream.dim() != 1:
            raise CorruptFileError("a stream of bins must be bytes")
        stream = as_bytes(stream)
        kind = _kind(like.dtype)
        chunks = ceil_div(like.nbytes, _CHUNK * kind.size)
        if stream.numel() < _HEAD.size + _ROW * chunks:
            raise CorruptFileError(f"{stream.numel()} bytes are too few for {chunks} chunks")
        (size,) = _HEAD.unpack(bytes(stream[: _HEAD.size].numpy()))
        model, rest = stream[_HEAD.size :][:size], stream[_HEAD.size + size :]
        if model.numel() != size or rest.numel() < _ROW * chunks:
            raise CorruptFileError(f"a stream of {stream.numel()} bytes with a model of {size}")
        return cls(kind.size, model, rest[: _ROW * chunks], rest[_ROW * chunks :])

    @property
    def chunks(self) -> int:
        return self.rows.numel() // _ROW

    def places(self, groups: Sequence[slice]) -> list[slice]:
        """Return where in `data` each of these groups lies, of which the first begins at 0."""
        sizes = np.frombuffer(bytes(self.rows.numpy()), "<u4").reshape(-1, 2)[:, 0]
        ends = accumulate((int(sizes[some].sum(dtype=np.int64)) for some in groups), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def decode(self, chunks: slice, place: slice, items: Tensor) -> None:
        """Decode consecutive chunks that lie at `place`."""
        rows, data = self.rows[scale_slice(chunks, _ROW)], self.data[place]
        try:
            _core.bins_decode(rows, data, self.itemsize, chunks.start * _CHUNK, self.model, items)
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
