"""Boxes: parts of a tensor, as ranks hold them and files store them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """Where a part of a tensor begins, and how large it is."""

    at: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box that is all of a tensor."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def overlap(self, other: "Box") -> "Box | None":
        """Return what two boxes of the same tensor have in common; none if nothing."""
        begin = tuple(map(max, self.at, other.at))
        ends = zip(self.at, self.shape, other.at, other.shape, strict=True)
        shape = tuple(
            min(a + n, b + m) - start for start, (a, n, b, m) in zip(begin, ends, strict=True)
        )
        return Box(begin, shape) if all(n > 0 for n in shape) else None

    def of(self, x: Tensor, outer: "Box") -> Tensor:
        """Return the items of this box as a view of `x`, which holds those of `outer`."""
        for dim, (at, start, n) in enumerate(zip(self.at, outer.at, self.shape, strict=True)):
            x = x.narrow(dim, at - start, n)
        return x

    def is_in(self, shape: tuple[int, ...]) -> bool:
        """Tell whether this is a part of a tensor of such a shape."""
        return len(self.at) == len(self.shape) == len(shape) and all(
            at >= 0 and n >= 0 and at + n <= size
            for at, n, size in zip(self.at, self.shape, shape, strict=True)
        )


def overlapping(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of a tensor that have items in common; none if all lie apart."""
    filled = [box for box in boxes if box.numel]
    if len(filled) < 2:
        return None
    # Along the dimension that tells the most apart, few others reach to where a box begins.
    dims = range(len(filled[0].at))
    dim = max(dims, key=lambda dim: len({box.at[dim] for box in filled}))
    reaching: list[Box] = []
    for box in sorted(filled, key=lambda box: box.at[dim]):
        reaching = [other for other in reaching if other.at[dim] + other.shape[dim] > box.at[dim]]
        for other in reaching:
            if box.overlap(other):
                return other, box
        reaching.append(box)
    return None


def pieces(chunk: Box, dtype: torch.dtype, limit: int, part: Box | None = None) -> Iterator[Box]:
    """Yield the pieces in which a chunk is stored: as many rows as `limit` bytes hold, or one.

    With `part`, a box in the chunk, only those that it touches.
    """
    part = part or chunk
    if not chunk.shape or not chunk.numel:
        yield chunk
        return
    rows = max(1, limit // (math.prod(chunk.shape[1:]) * dtype.itemsize))
    top, bottom = chunk.at[0], chunk.at[0] + chunk.shape[0]
    first = top + (part.at[0] - top) // rows * rows
    for begin in range(first, part.at[0] + part.shape[0], rows):
        height = min(rows, bottom - begin)
        yield Box((begin, *chunk.at[1:]), (height, *chunk.shape[1:]))
