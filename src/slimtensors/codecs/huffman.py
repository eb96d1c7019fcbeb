"""Any tensor: the bytes of its items in planes, each in a prefix code where that is smaller."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import chunk_groups, register, scale_slice
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, allocate, as_bytes, ceil_div

_CHUNK = _core.HUFFMAN_CHUNK
_GROUP = 8
"""Chunks per piece of work: enough to be worth a thread."""


@register
@dataclass(frozen=True)
class Huffman:
    """Give frequent bytes short codes: exponents, integers, whatever is not random. Lossless."""

    name: ClassVar[str] = "huffman"

    def encode(self, x: Tensor) -> Parts:
        """Return `chunks` (checksum and size of each plane, for each chunk) and `data`."""
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Check and decode every chunk."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Decide how to store each chunk, then store it where the sizes of all say."""
        kind = _kind(x.dtype)
        items = as_bytes(x)
        count, columns = kind.table(x.nbytes)
        chunks = torch.empty((count, columns), dtype=torch.uint32)
        rows = as_bytes(chunks)
        codes = torch.empty(count * kind.code_bytes, dtype=torch.uint8)
        groups = chunk_groups(count, _GROUP)

        def survey(i: int) -> None:
            some = groups[i]
            _core.huffman_survey(
                _cut(items, kind.items(some)),
                kind.itemsize,
                kind.rotated,
                _cut(codes, kind.codes(some)),
                _cut(rows, kind.rows(some)),
            )

        each(survey, len(groups))
        places = _places(chunks, groups)
        data = allocate(Spec(torch.uint8, (places[-1].stop if places else 0,)))

        def store(i: int) -> None:
            some = groups[i]
            _core.huffman_encode(
                _cut(items, kind.items(some)),
                kind.itemsize,
                kind.rotated,
                _cut(codes, kind.codes(some)),
                _cut(rows, kind.rows(some)),
                _cut(data, places[i]),
            )

        each(store, len(groups))
        return {"chunks": chunks, "data": data}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Decode groups of chunks side by side."""
        checked = _checked(parts, like)
        out = allocate(like)
        _decode_all(*checked, out, each)
        return out

    def step(self, spec: Spec) -> int:
        """Return the items of a chunk: a complex number is two of them."""
        return _CHUNK * _kind(spec.dtype).itemsize // spec.dtype.itemsize

    def cut(self, parts: Parts, like: Spec, every: int) -> list[Parts]:
        """Return the chunks of every so many items."""
        chunks, data = _checked(parts, like)
        groups = chunk_groups(chunks.shape[0], every // self.step(like))
        places = _all_places(chunks, groups, data)
        return [
            {"chunks": chunks[some], "data": data[place]}
            for some, place in zip(groups, places, strict=True)
        ]

    def decode_again(self, parts: Parts, out: Tensor, threads: int) -> None:
        """Decode into the memory of `out` on so many threads, without comparing checksums."""
        chunks, data = _checked(parts, Spec.of(out))
        decode = partial(_core.huffman_decode_again, threads=threads)
        _decode(as_bytes(chunks), data, _kind(out.dtype), as_bytes(out), decode)

    def decode_into(self, parts: Parts, out: Tensor, each: Each = serially) -> None:
        """Decode into the memory of `out`."""
        _decode_all(*_checked(parts, Spec.of(out)), out, each)

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor, decoding only their chunks."""
        kind = _kind(like.dtype)
        chunks, data = _checked(parts, like)
        if not 0 <= begin <= end <= like.numel:
            raise IndexError(f"items {begin} to {end} of {like.numel}")
        if begin == end:
            return torch.empty(0, dtype=like.dtype)
        step = self.step(like)
        some = slice(begin // step, ceil_div(end, step))
        first, last = some.start * step, min(some.stop * step, like.numel)
        place = _places(chunks, [slice(0, some.start), some])[1]
        out = allocate(Spec(like.dtype, (last - first,)))
        _decode(as_bytes(chunks[some]), data[place], kind, as_bytes(out))
        return out[begin - first : end - first]


@dataclass(frozen=True)
class _Kind:
    """How the core sees a dtype: items of 1, 2, 4 or 8 bytes, rotated to have exponents on top."""

    itemsize: int
    rotated: bool

    def table(self, nbytes: int) -> tuple[int, int]:
        """Return the shape of `chunks` for so many bytes."""
        return ceil_div(nbytes, _CHUNK * self.itemsize), 1 + self.itemsize

    @property
    def code_bytes(self) -> int:
        """What the codes of a chunk take before they are packed."""
        return 256 * self.itemsize

    # Where the bytes of some chunks lie.

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


def _cut(x: Tensor, part: slice) -> Tensor:
    """Return `x[part]`; most tensors are one group, and slicing costs more than you would think."""
    return x[part] if part.start or part.stop < x.shape[0] else x


def _places(chunks: Tensor, groups: Sequence[slice]) -> list[slice]:
    """Return where in `data` each of these groups lies, of which the first begins at 0."""
    sizes = chunks.numpy()[:, 1:]
    ends = accumulate((int(sizes[some].sum(dtype=np.int64)) for some in groups), initial=0)
    return [slice(begin, end) for begin, end in pairwise(ends)]


def _all_places(chunks: Tensor, groups: Sequence[slice], data: Tensor) -> list[slice]:
    """Return where each of these groups lies, which together are all chunks of `data`."""
    places = _places(chunks, groups)
    end = places[-1].stop if places else 0
    if end != data.numel():
        raise CorruptFileError(f"{data.numel()} bytes of data, but chunks of {end}")
    return places


def _checked(parts: Parts, like: Spec) -> tuple[Tensor, Tensor]:
    chunks, data = parts["chunks"], parts["data"]
    shape = _kind(like.dtype).table(like.nbytes)
    if chunks.dtype is not torch.uint32 or chunks.shape != shape or data.dtype is not torch.uint8:
        raise CorruptFileError(
            f"chunks of shape {tuple(chunks.shape)}, but shape {like.shape} needs {shape}"
        )
    return chunks, as_bytes(data)


def _decode_all(chunks: Tensor, data: Tensor, out: Tensor, each: Each) -> None:
    kind = _kind(out.dtype)
    rows, items = as_bytes(chunks), as_bytes(out)
    if chunks.shape[0] <= _GROUP:
        _decode(rows, data, kind, items)
        return
    groups = chunk_groups(chunks.shape[0], _GROUP)
    places = _all_places(chunks, groups, data)

    def one(i: int) -> None:
        some = groups[i]
        _decode(rows[kind.rows(some)], data[places[i]], kind, items[kind.items(some)])

    each(one, len(groups))


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
