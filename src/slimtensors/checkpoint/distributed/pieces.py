"""Pieces of tensors: boxes of rows, their names, and the content of the file of a rank."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from slimtensors.checkpoint.store import FlatState
from slimtensors.errors import CorruptFileError, UnsupportedTensorError
from slimtensors.storage import Folder
from slimtensors.tensor import Json, Spec, ceil_div

PIECE_BYTES = 2 << 20
"""Default size of a piece: the least that a reader of one row has to decode."""
PREFIX = "tensors."
"""Prefix of the names of all pieces."""

KeyPath = tuple[str | int, ...]
"""The keys of a value in the nested state, from the outside in."""


@dataclass(frozen=True, slots=True)
class Box:
    """Offset and shape of a rectangular part of a tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> "Box":
        """Return the box that covers a tensor of this shape."""
        return cls((0,) * len(shape), shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: "Box") -> "Box | None":
        """Return the intersection with another box of the same tensor, or None if it is empty."""
        offset = tuple(map(max, self.offset, other.offset))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        shape = tuple(
            min(a + n, b + m) - start for start, (a, n, b, m) in zip(offset, ends, strict=True)
        )
        return Box(offset, shape) if all(n > 0 for n in shape) else None

    def narrow(self, x: Tensor, outer: "Box") -> Tensor:
        """Return the elements of this box as a view of `x`, which contains those of `outer`."""
        for dim, (at, start, n) in enumerate(
            zip(self.offset, outer.offset, self.shape, strict=True)
        ):
            x = x.narrow(dim, at - start, n)
        return x

    def is_inside(self, shape: tuple[int, ...]) -> bool:
        """Return True if a tensor of this shape contains the box."""
        return len(self.offset) == len(self.shape) == len(shape) and all(
            at >= 0 and n >= 0 and at + n <= size
            for at, n, size in zip(self.offset, self.shape, shape, strict=True)
        )


def find_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes of a tensor that intersect, or None if all are disjoint."""
    filled = [box for box in boxes if box.numel]
    if len(filled) < 2:
        return None
    # Sweep along the dimension with the most distinct offsets: few boxes are active at a time.
    dims = range(len(filled[0].offset))
    dim = max(dims, key=lambda dim: len({box.offset[dim] for box in filled}))
    active: list[Box] = []
    for box in sorted(filled, key=lambda box: box.offset[dim]):
        start = box.offset[dim]
        active = [other for other in active if other.offset[dim] + other.shape[dim] > start]
        for other in active:
            if box.intersect(other):
                return other, box
        active.append(box)
    return None


def split_box(chunk: Box, dtype: torch.dtype, limit: int, part: Box | None = None) -> Iterator[Box]:
    """Yield the pieces in which a chunk is stored: rows of up to `limit` bytes, at least one.

    With `part`, a box inside the chunk, yield only the pieces that intersect it.
    """
    part = part or chunk
    if not chunk.shape or not chunk.numel:
        yield chunk
        return
    rows = _rows_per_piece(chunk, dtype, limit)
    top, bottom = chunk.offset[0], chunk.offset[0] + chunk.shape[0]
    first = top + (part.offset[0] - top) // rows * rows
    for start in range(first, part.offset[0] + part.shape[0], rows):
        height = min(rows, bottom - start)
        yield Box((start, *chunk.offset[1:]), (height, *chunk.shape[1:]))


def count_pieces(chunk: Box, dtype: torch.dtype, limit: int) -> int:
    """Return the number of pieces in which a chunk is stored."""
    if not chunk.shape or not chunk.numel:
        return 1
    return ceil_div(chunk.shape[0], _rows_per_piece(chunk, dtype, limit))


def _rows_per_piece(chunk: Box, dtype: torch.dtype, limit: int) -> int:
    return max(1, limit // (math.prod(chunk.shape[1:]) * dtype.itemsize))


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor, with their data."""

    tensor: str
    """Name of the tensor."""
    spec: Spec
    """Dtype and shape of the whole tensor."""
    path: KeyPath | None
    """Keys of the tensor in the nested state."""
    box: Box
    data: Tensor

    @property
    def name(self) -> str:
        """Name of the piece in its file: `tensors.NAME@ROW,COLUMN`."""
        return format_piece_name(self.tensor, self.box)


def format_piece_name(tensor: str, box: Box) -> str:
    """Return the name of a piece of a tensor in its file."""
    return f"{PREFIX}{tensor}{format_offset(box)}"


def format_offset(box: Box) -> str:
    """Return the suffix of the name of a piece."""
    return f"@{','.join(map(str, box.offset))}"


def parse_piece_name(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the name of the tensor of a piece, and the offset of the piece."""
    tensor, _, offset = name.removeprefix(PREFIX).rpartition("@")
    try:
        return tensor, tuple(int(n) for n in offset.split(",") if n)
    except ValueError:
        raise CorruptFileError(f"{name}: invalid piece name") from None


def format_file_name(rank: int) -> str:
    """Return the name of the file of a rank."""
    return f"rank-{rank:05d}.safetensors"


def build_rank_state(
    run: str, rank: int, pieces: Sequence[Piece], objects: Mapping[str, Any]
) -> FlatState:
    """Return the content of the file of a rank."""
    tensors = {piece.name.removeprefix(PREFIX): piece.data.detach() for piece in pieces}
    state = {"run": run, "rank": rank, "objects": dict(objects), "tensors": tensors}
    try:
        return FlatState.of(state)
    except UnsupportedTensorError as error:  # with the path in the state of the user
        raise UnsupportedTensorError(str(error).removeprefix("objects.")) from error


@dataclass(frozen=True)
class RankOutline:
    """The content of the file of a rank without its tensors."""

    run: str
    objects: Mapping[str, Any]
    """Outlines of the values that are not tensors."""


def parse_rank_outline(tree: Json | None, path: Folder) -> RankOutline:
    """Parse the outline of the file of a rank."""
    match tree:
        case {"dict": [["run", str(run)], ["rank", int()], ["objects", {"dict": list(pairs)}], *_]}:
            rows = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            objects = {name: outline for name, outline in rows if isinstance(name, str)}
            if len(objects) == len(pairs):
                return RankOutline(run, objects)
    raise CorruptFileError(f"{path} is not the file of a rank")
