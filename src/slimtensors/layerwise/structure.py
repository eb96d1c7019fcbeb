"""Which weights may go together: anywhere, so many of so many neighbours, whole rows, or blocks."""

import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slimtensors.errors import ConfigError


class Structure(Protocol):
    """A rule for where zeros may be."""

    @property
    def name(self) -> str:
        """What a recipe calls it."""
        ...

    @property
    def share(self) -> float | None:
        """The share of zeros, if the rule fixes it."""
        ...

    def at_once(self, columns: int, *, about: int) -> int:
        """Return how many neighbouring columns to decide at once: `about` so many, if it can be."""
        ...

    def check(self, rows: int, columns: int) -> None:
        """Raise if a matrix of this shape cannot have the structure."""
        ...

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return where a matrix `[rows, columns]` becomes zero: where scores are lowest.

        With `per_row`, weights are compared only with others of their row, where that is possible.
        """
        ...


@dataclass(frozen=True)
class Unstructured:
    """Zeros anywhere."""

    name: str = "unstructured"
    share: None = None

    def at_once(self, columns: int, *, about: int) -> int:
        """Return as many as asked for."""
        return min(about, columns)

    def check(self, rows: int, columns: int) -> None:
        """Take any shape."""

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return the lowest scores of the matrix, or of each row."""
        table = scores if per_row else scores.reshape(1, -1)
        return _lowest(table, round(share * table.shape[1])).view(scores.shape)


@dataclass(frozen=True)
class Groups:
    """At most `kept` of every `size` neighbours in a row are not zero."""

    kept: int
    size: int

    @property
    def name(self) -> str:
        """As in `2:4`."""
        return f"{self.kept}:{self.size}"

    @property
    def share(self) -> float:
        """What is not kept."""
        return 1 - self.kept / self.size

    def at_once(self, columns: int, *, about: int) -> int:
        """Return the size of a group."""
        return self.size

    def check(self, rows: int, columns: int) -> None:
        """Take rows of whole groups."""
        if columns % self.size:
            raise ConfigError(f"rows of {columns} are not whole groups of {self.size}; ignore it")

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return the lowest scores of each group."""
        groups = scores.reshape(-1, self.size)
        least = groups.topk(self.size - self.kept, dim=1, largest=False, sorted=False).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, least, True).view_as(scores)


@dataclass(frozen=True)
class Rows:
    """Whole rows: outputs of a layer that are always zero, but for its bias."""

    name: str = "rows"
    share: None = None

    def at_once(self, columns: int, *, about: int) -> int:
        """Return all columns."""
        return columns

    def check(self, rows: int, columns: int) -> None:
        """Take any shape."""

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return the rows of least score."""
        totals = scores.sum(1)[None]
        return _lowest(totals, round(share * len(scores))).T.expand_as(scores)


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of so many rows and columns."""

    height: int
    width: int
    share: None = None

    @property
    def name(self) -> str:
        """As in `16x16`."""
        return f"{self.height}x{self.width}"

    def at_once(self, columns: int, *, about: int) -> int:
        """Return whole blocks."""
        return max(about // self.width, 1) * self.width

    def check(self, rows: int, columns: int) -> None:
        """Take matrices of whole blocks."""
        if rows % self.height or columns % self.width:
            raise ConfigError(f"{rows} x {columns} is not made of blocks of {self.name}; ignore it")

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return the blocks of least score, of the matrix or of each row of blocks."""
        rows, columns = scores.shape
        tiles = scores.reshape(rows // self.height, self.height, columns // self.width, self.width)
        totals = tiles.sum((1, 3))
        lowest = Unstructured().zeros(totals, share, per_row=per_row)
        return lowest[:, None, :, None].expand_as(tiles).reshape(scores.shape)


_GROUPS = re.compile(r"(\d+):(\d+)")
_BLOCKS = re.compile(r"(\d+)x(\d+)")


def parse_structure(text: str) -> Structure:
    """Return the structure that a recipe means: `unstructured`, `2:4`, `rows`, `16x16`.

    `0:0` is how others say unstructured.
    """
    if text in ("unstructured", "0:0"):
        return Unstructured()
    if text in ("rows", "row"):
        return Rows()
    if (found := _GROUPS.fullmatch(text)) and 0 < int(found[1]) < int(found[2]):
        return Groups(int(found[1]), int(found[2]))
    if (found := _BLOCKS.fullmatch(text)) and int(found[1]) and int(found[2]):
        return Blocks(int(found[1]), int(found[2]))
    raise ConfigError(
        f"mask_structure {text!r} is none of unstructured, kept:size as in 2:4, rows, and"
        " height x width as in 16x16"
    )


def _lowest(table: Tensor, count: int) -> Tensor:
    """Return where the `count` lowest numbers of each row are; of equal ones, the first."""
    if count <= 0:
        return torch.zeros_like(table, dtype=torch.bool)
    limit = _smallest(table, count)
    below = table < limit
    equal = table == limit
    missing = count - below.sum(1, keepdim=True)
    if (equal.sum(1, keepdim=True) > missing).any():
        equal &= equal.cumsum(1) <= missing
    return below | equal


def _smallest(table: Tensor, count: int) -> Tensor:
    """Return the `count`-th smallest number of each row `[rows, 1]`."""
    if table.device.type != "cpu":
        return table.kthvalue(count, dim=1, keepdim=True).values
    # Ten times as fast. NumPy has no bfloat16.
    known = table.float() if table.dtype is torch.bfloat16 else table
    parted = np.partition(known.detach().numpy(), count - 1, axis=1)
    return torch.from_numpy(parted[:, count - 1 : count])
