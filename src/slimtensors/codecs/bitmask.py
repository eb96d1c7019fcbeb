"""Sparse tensors: one bit per position, and the nonzero values."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, allocate, as_bytes, ceil_div

_CHUNK = 1 << 20
"""Items per piece of work: small enough for the cache, large enough for a thread."""


@register
@dataclass(frozen=True)
class Bitmask:
    """Store nonzero values and a bit per position. Lossless: -0.0 and NaN payloads survive."""

    name: ClassVar[str] = "bitmask"
    part_names: ClassVar[tuple[str, ...]] = ("mask", "values")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `mask` (a bit per item, low bit first) and `values`."""
        items = as_bytes(x)
        mask, counts = find_nonzero(items, x.element_size(), x.numel(), each)
        values = gather(items, x.element_size(), x.numel(), mask, counts, each)
        return {"mask": mask.view(mask_shape(Spec.of(x))), "values": values.view(x.dtype)}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Scatter `values` to the positions set in `mask`."""
        mask = parts["mask"]
        if tuple(mask.shape) != mask_shape(like):
            raise CorruptFileError(
                f"mask of shape {tuple(mask.shape)} does not fit shape {like.shape}"
            )
        return scatter(mask.view(-1), as_bytes(parts["values"]), like, like.numel, each)

    def step(self, spec: Spec) -> int:
        """Return 8: slices start at a whole byte of the mask."""
        return 8


def mask_shape(spec: Spec) -> tuple[int, ...]:
    """Return the shape of a mask: two-dimensional if rows of the tensor fill whole bytes."""
    if len(spec.shape) > 1 and spec.numel and spec.shape[-1] % 8 == 0:
        return spec.numel // spec.shape[-1], spec.shape[-1] // 8
    return (mask_bytes(spec.numel, spec.numel),)


def mask_bytes(numel: int, row: int) -> int:
    """Return the size of the mask of `numel` items if every row starts a new byte."""
    return numel // row * ceil_div(row, 8) if numel else 0


def find_nonzero(items: Tensor, itemsize: int, row: int, each: Each) -> tuple[Tensor, list[int]]:
    """Return the mask of nonzero items, and their number in each chunk."""
    numel = items.numel() // itemsize
    mask = allocate(Spec(torch.uint8, (mask_bytes(numel, row),)))
    spans = row_chunks(numel, row)

    def find_in_chunk(i: int) -> int:
        first, last, low, high = spans[i]
        piece = items[first * itemsize : last * itemsize]
        return _core.bitmask_find(piece, itemsize, min(row, last - first), mask[low:high])

    return mask, each(find_in_chunk, len(spans))


def gather(
    items: Tensor, itemsize: int, row: int, mask: Tensor, counts: list[int], each: Each
) -> Tensor:
    """Return the bytes of the items that `mask` selects; `counts` is from `find_nonzero`."""
    values = allocate(Spec(torch.uint8, (sum(counts) * itemsize,)))
    spans = row_chunks(items.numel() // itemsize, row)
    offsets = list(pairwise(accumulate(counts, initial=0)))

    def gather_chunk(i: int) -> None:
        first, last, low, high = spans[i]
        begin, end = offsets[i]
        _core.bitmask_gather(
            items[first * itemsize : last * itemsize],
            itemsize,
            min(row, last - first),
            mask[low:high],
            values[begin * itemsize : end * itemsize],
        )

    each(gather_chunk, len(spans))
    return values


def scatter(mask: Tensor, values: Tensor, like: Spec, row: int, each: Each) -> Tensor:
    """Build the tensor with `values` at the positions set in `mask`, and zeros elsewhere."""
    itemsize = like.dtype.itemsize
    if mask.dtype is not torch.uint8 or mask.numel() != mask_bytes(like.numel, row):
        raise CorruptFileError(f"mask of {mask.nbytes} bytes does not fit shape {like.shape}")
    out = allocate(like)
    items = as_bytes(out)
    if like.numel <= _CHUNK:
        _scatter(mask, max(row, 1), values, itemsize, items)
        return out
    spans = row_chunks(like.numel, row)
    counts = each(lambda i: _core.popcount(mask[spans[i][2] : spans[i][3]]), len(spans))
    if sum(counts) * itemsize != values.numel():
        raise CorruptFileError(
            f"mask has {sum(counts)} bits set, but values have {values.numel()} bytes"
        )
    offsets = list(pairwise(accumulate(counts, initial=0)))

    def scatter_chunk(i: int) -> None:
        first, last, low, high = spans[i]
        begin, end = offsets[i]
        _scatter(
            mask[low:high],
            min(row, last - first),
            values[begin * itemsize : end * itemsize],
            itemsize,
            items[first * itemsize : last * itemsize],
        )

    each(scatter_chunk, len(spans))
    return out


def _scatter(mask: Tensor, row: int, values: Tensor, itemsize: int, items: Tensor) -> None:
    try:
        _core.bitmask_scatter(mask, row, values, itemsize, items)
    except ValueError as error:
        raise CorruptFileError(str(error)) from error


def row_chunks(numel: int, row: int) -> list[tuple[int, int, int, int]]:
    """Divide items into chunks: first and last item, first and last byte of the mask.

    A chunk consists of whole rows, or of whole mask bytes if there is only one row.
    """
    if numel == 0:
        return []
    step = _CHUNK if row == numel else max(_CHUNK // row, 1) * row
    width = ceil_div(row, 8)
    spans = []
    for first in range(0, numel, step):
        last = min(first + step, numel)
        if row == numel:
            spans.append((first, last, first // 8, ceil_div(last, 8)))
        else:
            spans.append((first, last, first // row * width, last // row * width))
    return spans
