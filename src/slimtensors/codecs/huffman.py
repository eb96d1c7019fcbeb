"""Huffman coding of any tensor: byte planes, each with a prefix code if that is smaller."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors._moved import Renamed
from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, scale_slice, serially, split_chunks
from slimtensors.tensor import Parts, Spec, allocate, as_bytes, ceil_div, empty_bytes

_CHUNK = _core.HUFFMAN_CHUNK
_GROUP = 8
"""Chunks per piece of work: enough for a thread."""


@register
@dataclass(frozen=True)
class Huffman:
    """Give frequent bytes short codes: exponents, integers, all that is not random. Lossless."""

    name: ClassVar[str] = "huffman"
    part_names: ClassVar[tuple[str, ...]] = ("chunks", "data")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `chunks` (for each chunk, its checksum and the size of each plane) and `data`."""
        kind = _kind(x.dtype)
        items = as_bytes(x)
        count, columns = kind.table(x.nbytes)
        chunks = torch.empty((count, columns), dtype=torch.uint32)
        rows = as_bytes(chunks)
        codes = empty_bytes(count * kind.code_bytes)
        groups = split_chunks(count, _GROUP)

        def survey(i: int) -> None:
            group = groups[i]
            _core.huffman_survey(
                _slice(items, kind.items(group)),
                kind.itemsize,
                kind.rotated,
                _slice(codes, kind.codes(group)),
                _slice(rows, kind.rows(group)),
            )

        each(survey, len(groups))
        ranges = _locate(chunks, groups)
        data = allocate(Spec(torch.uint8, (ranges[-1].stop if ranges else 0,)))

        def store(i: int) -> None:
            group = groups[i]
            _core.huffman_encode(
                _slice(items, kind.items(group)),
                kind.itemsize,
                kind.rotated,
                _slice(codes, kind.codes(group)),
                _slice(rows, kind.rows(group)),
                _slice(data, ranges[i]),
            )

        each(store, len(groups))
        return {"chunks": chunks, "data": data}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Decode every chunk and compare its checksum."""
        chunks, data = _check_parts(parts, like)
        out = allocate(like)
        _decode_all(chunks, data, out, each)
        return out

    def decode_into(self, parts: Parts, out: Tensor, each: Each = serially) -> None:
        """Decode into the memory of `out`."""
        _decode_all(*_check_parts(parts, Spec.of(out)), out, each)

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor, decoding only their chunks."""
        kind = _kind(like.dtype)
        chunks, data = _check_parts(parts, like)
        if not 0 <= begin <= end <= like.numel:
            raise IndexError(f"items {begin} to {end} are out of range for {like.numel} items")
        if begin == end:
            return torch.empty(0, dtype=like.dtype)
        step = self.step(like)
        group = slice(begin // step, ceil_div(end, step))
        first, last = group.start * step, min(group.stop * step, like.numel)
        at = _locate(chunks, [slice(0, group.start), group])[1]
        out = allocate(Spec(like.dtype, (last - first,)))
        _decode(as_bytes(chunks[group]), data[at], kind, as_bytes(out))
        return out[begin - first : end - first]

    def step(self, spec: Spec) -> int:
        """Return the number of items in a chunk; a complex number counts twice."""
        return _CHUNK * _kind(spec.dtype).itemsize // spec.dtype.itemsize

    cut, decode_again = Renamed("split_parts"), Renamed("decode_unchecked")

    def split_parts(self, parts: Parts, like: Spec, items: int) -> list[Parts]:
        """Return the parts of slices of `items` items, a multiple of `step`, as views."""
        chunks, data = _check_parts(parts, like)
        groups = split_chunks(chunks.shape[0], items // self.step(like))
        ranges = _locate_all(chunks, groups, data)
        return [
            {"chunks": chunks[group], "data": data[at]}
            for group, at in zip(groups, ranges, strict=True)
        ]

    def decode_unchecked(self, parts: Parts, out: Tensor, threads: int) -> None:
        """Decode into the memory of `out` with `threads` threads, without comparing checksums."""
        chunks, data = _check_parts(parts, Spec.of(out))
        decode = partial(_core.huffman_decode_again, threads=threads)
        _decode(as_bytes(chunks), data, _kind(out.dtype), as_bytes(out), decode)


@dataclass(frozen=True)
class _Kind:
    """A dtype for the C++ core: items of 1, 2, 4 or 8 bytes, rotated to have exponents on top."""

    itemsize: int
    rotated: bool

    def table(self, nbytes: int) -> tuple[int, int]:
        """Return the shape of `chunks` for a tensor of `nbytes` bytes."""
        return ceil_div(nbytes, _CHUNK * self.itemsize), 1 + self.itemsize

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a chunk before they are packed."""
        return 256 * self.itemsize

    # Byte ranges of consecutive chunks.

    def items(self, chunks: slice) -> slice:
        return scale_slice(chunks, _CHUNK * self.itemsize)

    def codes(self, chunks: slice) -> slice:
        return scale_slice(chunks, self.code_bytes)

    def rows(self, chunks: slice) -> slice:
        return scale_slice(chunks, 4 * (1 + self.itemsize))


@cache
def _kind(dtype: torch.dtype) -> _Kind:
    if dtype.is_complex:
        return _Kind(dtype.itemsize // 2, rotated=True)
    return _Kind(dtype.itemsize, rotated=dtype.is_floating_point and dtype.itemsize > 1)


def _slice(x: Tensor, part: slice) -> Tensor:
    """Return `x[part]`, or `x` if that is all of it, which is common: slicing is slow."""
    return x[part] if part.start or part.stop < x.shape[0] else x


def _locate(chunks: Tensor, groups: Sequence[slice]) -> list[slice]:
    """Return the byte range in `data` of consecutive groups, the first of which starts at 0."""
    sizes = chunks.numpy()[:, 1:]
    ends = accumulate((int(sizes[group].sum(dtype=np.int64)) for group in groups), initial=0)
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _locate_all(chunks: Tensor, groups: Sequence[slice], data: Tensor) -> list[slice]:
    """Return the byte ranges of groups that together contain all chunks of `data`."""
    ranges = _locate(chunks, groups)
    size = ranges[-1].stop if ranges else 0
    if size != data.numel():
        raise CorruptFileError(f"expected {size} bytes of chunks, got {data.numel()}")
    return ranges


def _check_parts(parts: Parts, like: Spec) -> tuple[Tensor, Tensor]:
    chunks, data = parts["chunks"], parts["data"]
    shape = _kind(like.dtype).table(like.nbytes)
    if chunks.dtype is not torch.uint32 or chunks.shape != shape or data.dtype is not torch.uint8:
        raise CorruptFileError(
            f"expected chunks of shape {shape} for shape {like.shape}, got {tuple(chunks.shape)}"
        )
    return chunks, as_bytes(data)


def _decode_all(chunks: Tensor, data: Tensor, out: Tensor, each: Each) -> None:
    kind = _kind(out.dtype)
    rows, items = as_bytes(chunks), as_bytes(out)
    if chunks.shape[0] <= _GROUP:
        _decode(rows, data, kind, items)
        return
    groups = split_chunks(chunks.shape[0], _GROUP)
    ranges = _locate_all(chunks, groups, data)

    def decode_group(i: int) -> None:
        group = groups[i]
        _decode(rows[kind.rows(group)], data[ranges[i]], kind, items[kind.items(group)])

    each(decode_group, len(groups))


def _decode(
    rows: Tensor,
    data: Tensor,
    kind: _Kind,
    items: Tensor,
    decode: Callable[..., None] = _core.huffman_decode,
) -> None:
    try:
        decode(rows, data, kind.itemsize, kind.rotated, items)
    except ValueError as error:
        raise CorruptFileError(str(error)) from error
