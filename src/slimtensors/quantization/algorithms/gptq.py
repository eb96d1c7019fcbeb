"""GPTQ: round column after column, and let those still to come make up for the error so far.

After Frantar et al., 2022; as Chen et al., 2025, show, the same as Babai's nearest plane algorithm,
which is how it is done here.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.quantization.affine import Params, check_weight, fake_quantize
from slimtensors.quantization.algorithms.hessian import Tell, pulls
from slimtensors.quantization.algorithms.rtn import Rounded
from slimtensors.quantization.args import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationStrategy,
)
from slimtensors.quantization.observers import observe_weight


def gptq(
    weight: Tensor,
    hessian: Tensor,
    args: QuantizationArgs,
    *,
    mask: Tensor | None = None,
    params: Params | None = None,
    damping: float = 0.01,
    static_groups: bool = True,
    tell: Tell = lambda text: None,
) -> Rounded:
    """Round a weight `[rows, columns]` so that its outputs, on the inputs seen, change least.

    Where `mask` is false the result is exactly zero, and only kept weights take over errors.
    `params` are what the observer of `args` finds, if not given. With `static_groups` off, those
    of a group are found when its turn comes, from weights that have already taken over errors.
    `tell` gets what was done beyond that: more damping, inputs that were always zero.
    """
    _check(weight, hessian, args, mask)
    order = _order(hessian, args)
    groups_follow = args.actorder is ActivationOrdering.GROUP and _is_grouped(args)
    if groups_follow and params is not None:
        raise ConfigError("with actorder 'group' the groups, and so the params, are found here")
    if not static_groups and (params is not None or not _can_wait(args)):
        raise ConfigError("scales can wait only in groups that are neighbours in GPTQ's order")
    ordered = weight[:, order]
    if params is None:
        params = observe_weight(ordered if groups_follow else weight, args)
    width = _group_width(args, weight.shape[1])
    places = torch.arange(weight.shape[1], device=weight.device)
    group_of = (places if groups_follow else order) // width
    columns = ordered.T.float().contiguous()
    sweep = _Sweep(
        aims=columns,
        errors=columns.clone(),
        pulls=pulls(hessian.float()[order][:, order], damping=damping, tell=tell),
        keep=None if mask is None else mask[:, order].T.contiguous(),
        scales=_Scales.of(params, args, weight.shape[0]),
        group_of=group_of.tolist(),
        width=width,
        waits=not static_groups,
    )
    sweep.run(0, weight.shape[1])
    back = order.argsort()
    if not static_groups:
        params = sweep.scales.params(params)
    if groups_follow:
        params = replace(params, g_idx=(back // width).int())
    return Rounded(sweep.aims[back].T.contiguous().to(weight.dtype), params)


@dataclass
class _Scales:
    """One scale, and perhaps a zero point, for each group of columns and each row."""

    scale: Tensor
    zero_point: Tensor | None
    args: QuantizationArgs
    dtype: torch.dtype
    """Of the scales as they will be stored: what numbers are rounded to."""

    @classmethod
    def of(cls, params: Params, args: QuantizationArgs, rows: int) -> "_Scales":
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


@dataclass
class _Sweep:
    """A weight, transposed, on its way through GPTQ: its columns lie in memory one by one."""

    aims: Tensor
    """What each column had better be, given the errors so far; once rounded, what it is."""
    errors: Tensor
    """What each column was less what it became, once rounded; until then, what it was."""
    pulls: Tensor
    keep: Tensor | None
    scales: _Scales
    group_of: list[int]
    width: int
    waits: bool

    def run(self, begin: int, end: int) -> None:
        """Round these columns; errors of those before are already in their aims.

        Halving makes nearly all of the work products of large matrices.
        """
        if end - begin == 1:
            return self._round(begin)
        middle = self._middle(begin, end)
        self.run(begin, middle)
        pull = self.pulls[begin:middle, middle:end]
        self.aims[middle:end].addmm_(pull.T, self.errors[begin:middle])
        return self.run(middle, end)

    def _middle(self, begin: int, end: int) -> int:
        size = end - begin
        if size <= self.width:
            return begin + size // 2
        groups = -(-size // self.width)
        return begin + groups // 2 * self.width  # a group is not begun before its turn

    def _round(self, column: int) -> None:
        group = self.group_of[column]
        if self.waits and column % self.width == 0:
            here = slice(column, column + self.width)
            known = self.aims[here] if self.keep is None else self.aims[here] * self.keep[here]
            self.scales.renew(group, known)
        rounded = self.scales.round(self.aims[column], group)
        if self.keep is not None:
            rounded = rounded.where(self.keep[column], 0.0)
        self.aims[column] = rounded
        self.errors[column] -= rounded


def _check(weight: Tensor, hessian: Tensor, args: QuantizationArgs, mask: Tensor | None) -> None:
    check_weight(weight, args)
    if weight.dim() != 2:
        raise ConfigError(f"GPTQ takes one matrix at a time, not {tuple(weight.shape)}")
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise ConfigError(f"a Hessian of {tuple(hessian.shape)} for {columns} columns")
    if not torch.isfinite(hessian).all():
        raise ConfigError("NaN or infinity in the Hessian; check the calibration data")
    if mask is not None and (mask.shape != weight.shape or mask.dtype is not torch.bool):
        raise ConfigError(f"a mask is bool of shape {tuple(weight.shape)}")


def _order(hessian: Tensor, args: QuantizationArgs) -> Tensor:
    """Return the columns in the order in which they are rounded."""
    if args.actorder is None:
        return torch.arange(len(hessian), device=hessian.device)
    return hessian.diagonal().argsort(descending=True, stable=True)


def _group_width(args: QuantizationArgs, columns: int) -> int:
    if args.block_structure:
        return args.block_structure[1]
    return args.group_size if args.group_size and args.group_size > 0 else columns


def _is_grouped(args: QuantizationArgs) -> bool:
    return args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def _can_wait(args: QuantizationArgs) -> bool:
    is_plain = args.strategy is QuantizationStrategy.GROUP
    return is_plain and args.actorder is not ActivationOrdering.WEIGHT
