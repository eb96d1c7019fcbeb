"""Settle the columns of a weight one after the other, each making up for those before it."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors.quantization.affine import Params, fake_quantize
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.observers import observe_weight
from slimtensors.tensor import ceil_div


@dataclass
class Grid:
    """One scale, and perhaps a zero point, for each group of columns and each row."""

    scale: Tensor
    zero_point: Tensor | None
    args: QuantizationArgs
    dtype: torch.dtype
    """Of the scales as they will be stored: what numbers are rounded to."""

    @classmethod
    def of(cls, params: Params, args: QuantizationArgs, rows: int) -> "Grid":
        """Spread params over all rows."""
        scale = params.scale.float()
        if params.global_scale is not None:
            scale = scale / params.global_scale.float()
        plain = replace(
            args,
            strategy=QuantizationStrategy.CHANNEL,
            group_size=None,
            block_structure=None,
            actorder=None,
        )
        zero = params.zero_point
        height = args.block_structure[0] if args.block_structure else rows

        def spread(x: Tensor) -> Tensor:
            table = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)
            if len(table) < rows:
                table = table.repeat_interleave(height, dim=0)[:rows]
            return table.T.contiguous()

        zeros = None if zero is None else spread(zero.float())
        return cls(spread(scale), zeros, plain, params.scale.dtype)

    def round(self, x: Tensor, group: int) -> Tensor:
        """Return what the numbers of one column become."""
        zero = None if self.zero_point is None else self.zero_point[group]
        rounded = fake_quantize(x, Params(self.scale[group], zero), self.args)
        return rounded if self.dtype is torch.float32 else rounded.to(self.dtype).float()

    def renew(self, group: int, weights: Tensor) -> None:
        """Find the scales of a group anew from its weights `[columns, rows]`."""
        params = observe_weight(weights.T.to(self.dtype), self.args)
        self.scale[group] = params.scale[:, 0].float()
        if self.zero_point is not None and params.zero_point is not None:
            self.zero_point[group] = params.zero_point[:, 0].float()

    def params(self, like: Params) -> Params:
        """Return the scales in the dtypes of other params."""
        zero = self.zero_point
        return replace(
            like,
            scale=self.scale.T.contiguous().to(like.scale.dtype),
            zero_point=None
            if zero is None or like.zero_point is None
            else zero.T.contiguous().to(like.zero_point.dtype),
        )


def group_width(args: QuantizationArgs, columns: int) -> int:
    """Return how many neighbouring columns of a weight share a scale."""
    if args.block_structure:
        return args.block_structure[1]
    return args.group_size if args.group_size and args.group_size > 0 else columns


Settle = Callable[[int], Tensor]
"""Returns what a column becomes, once all before it are settled."""


@dataclass(frozen=True)
class Sweep:
    """A weight on its way, transposed: its columns lie in memory one by one."""

    aims: Tensor
    """What each column had better be, given the errors so far; once settled, what it is."""
    errors: Tensor
    """What each column was less what it became, once settled; until then, what it was."""
    pulls: Tensor
    """By how much errors of columns pull on those after them."""
    width: int
    """When the first of so many columns is settled, no later error is missing in their aims."""

    @classmethod
    def of(cls, columns: Tensor, pulls: Tensor, *, width: int) -> "Sweep":
        """Begin with a weight `[columns, rows]`, which is used up."""
        return cls(columns, columns.clone(), pulls, width)

    def run(self, settle: Settle) -> Tensor:
        """Settle all columns and return them."""
        self._run(0, len(self.aims), settle)
        return self.aims

    def _run(self, begin: int, end: int, settle: Settle) -> None:
        """Settle these columns; errors of those before are already in their aims.

        Halving makes nearly all of the work products of large matrices.
        """
        if end - begin == 1:
            settled = settle(begin)
            self.aims[begin] = settled
            self.errors[begin] -= settled
            return
        middle = self._middle(begin, end)
        self._run(begin, middle, settle)
        pull = self.pulls[begin:middle, middle:end]
        self.aims[middle:end].addmm_(pull.T, self.errors[begin:middle])
        self._run(middle, end, settle)

    def _middle(self, begin: int, end: int) -> int:
        size = end - begin
        if size <= self.width:
            return begin + size // 2
        groups = ceil_div(size, self.width)
        return begin + groups // 2 * self.width
