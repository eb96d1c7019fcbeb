"""Structures of zeros: unstructured, N:M groups, whole rows, or blocks."""

import re
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from slimtensors.errors import ConfigError


class Structure(Protocol):
    """A rule for the positions of zeros."""

    @property
    def name(self) -> str:
        """Name in recipes."""
        ...

    @property
    def share(self) -> float | None:
        """Share of zeros if the structure determines it, else None."""
        ...

    def at_once(self, columns: int, *, about: int) -> int:
        """Return how many adjacent columns to prune at once, close to `about` if possible."""
        ...

    def check(self, rows: int, columns: int) -> None:
        """Raise if a matrix of this shape does not fit the structure."""
        ...

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return a mask of the weights to prune, those with the lowest scores `[rows, columns]`.

        With `per_row`, weights are compared within their row only, if the structure allows it.
        """
        ...


@dataclass(frozen=True)
class Unstructured:
    """Zeros at any position."""

    name: str = "unstructured"
    share: None = None

    def at_once(self, columns: int, *, about: int) -> int:
        """Return `about`, limited to the number of columns."""
        return min(about, columns)

    def check(self, rows: int, columns: int) -> None:
        """Accept any shape."""

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return a mask of the lowest scores of the matrix, or of each row."""
        table = scores if per_row else scores.reshape(1, -1)
        return _lowest(table, round(share * table.shape[1])).view(scores.shape)


@dataclass(frozen=True)
class Groups:
    """At most `kept` nonzero weights in every `size` adjacent weights of a row."""

    kept: int
    size: int

    @property
    def name(self) -> str:
        """Name like `2:4`."""
        return f"{self.kept}:{self.size}"

    @property
    def share(self) -> float:
        """Share of weights that are not kept."""
        return 1 - self.kept / self.size

    def at_once(self, columns: int, *, about: int) -> int:
        """Return the group size."""
        return self.size

    def check(self, rows: int, columns: int) -> None:
        """Raise unless rows divide into groups."""
        if columns % self.size:
            raise ConfigError(
                f"{columns} columns are not divisible into groups of {self.size};"
                " add the layer to ignore"
            )

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return a mask of the lowest scores of each group."""
        groups = scores.reshape(-1, self.size)
        lowest = groups.topk(self.size - self.kept, dim=1, largest=False, sorted=False).indices
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(1, lowest, True).view_as(scores)


@dataclass(frozen=True)
class Rows:
    """Whole rows: outputs of a layer that are zero, except for the bias."""

    name: str = "rows"
    share: None = None

    def at_once(self, columns: int, *, about: int) -> int:
        """Return the number of columns."""
        return columns

    def check(self, rows: int, columns: int) -> None:
        """Accept any shape."""

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return a mask of the rows with the lowest sum of scores."""
        totals = scores.sum(1)[None]
        return _lowest(totals, round(share * len(scores))).T.expand_as(scores)


@dataclass(frozen=True)
class Blocks:
    """Whole blocks of `height` rows and `width` columns."""

    height: int
    width: int
    share: None = None

    @property
    def name(self) -> str:
        """Name like `16x16`."""
        return f"{self.height}x{self.width}"

    def at_once(self, columns: int, *, about: int) -> int:
        """Return a multiple of the block width."""
        return max(about // self.width, 1) * self.width

    def check(self, rows: int, columns: int) -> None:
        """Raise unless the matrix divides into blocks."""
        if rows % self.height or columns % self.width:
            raise ConfigError(
                f"{rows} x {columns} does not divide into blocks of {self.name};"
                " add the layer to ignore"
            )

    def zeros(self, scores: Tensor, share: float, *, per_row: bool = False) -> Tensor:
        """Return a mask of the blocks with the lowest sum, of the matrix or of each block row."""
        rows, columns = scores.shape
        tiles = scores.reshape(rows // self.height, self.height, columns // self.width, self.width)
        totals = tiles.sum((1, 3))
        lowest = Unstructured().zeros(totals, share, per_row=per_row)
        return lowest[:, None, :, None].expand_as(tiles).reshape(scores.shape)


_GROUPS = re.compile(r"(\d+):(\d+)")
_BLOCKS = re.compile(r"(\d+)x(\d+)")


def parse_structure(text: str) -> Structure:
    """Return the structure of a name: `unstructured`, `2:4`, `rows`, `16x16`.

    `0:0` is an alias of `unstructured`, as in llm-compressor.
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
        f"unknown mask_structure {text!r}; expected unstructured, kept:size (2:4), rows, or"
        " height x width (16x16)"
    )


def _lowest(table: Tensor, count: int) -> Tensor:
    """Return a mask of the `count` lowest values of each row; the first ones among equals."""
    if count <= 0:
        return torch.zeros_like(table, dtype=torch.bool)
    threshold = _kth_smallest(table, count)
    below = table < threshold
    equal = table == threshold
    missing = count - below.sum(1, keepdim=True)
    if (equal.sum(1, keepdim=True) > missing).any():
        equal &= equal.cumsum(1) <= missing
    return below | equal


def _kth_smallest(table: Tensor, count: int) -> Tensor:
    """Return the `count`-th smallest value of each row as `[rows, 1]`."""
    if table.device.type != "cpu":
        return table.kthvalue(count, dim=1, keepdim=True).values
    # NumPy is ten times as fast as kthvalue, but does not support bfloat16.
    values = table.float() if table.dtype is torch.bfloat16 else table
    partitioned = np.partition(values.detach().numpy(), count - 1, axis=1)
    return torch.from_numpy(partitioned[:, count - 1 : count])
