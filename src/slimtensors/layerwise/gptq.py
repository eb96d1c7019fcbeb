"""Quantize one matrix: round-to-nearest and GPTQ."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.layerwise.hessian import NoteCallback, Sweep, factor_hessian
from slimtensors.quantization.affine import Params, check_weight, fake_quantize
from slimtensors.quantization.args import ActivationOrdering, QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.observers import observe_weight


class Rounded(NamedTuple):
    """A weight whose values are all representable by codes, and the scales that decode them."""

    weight: Tensor
    params: Params


def rtn(weight: Tensor, args: QuantizationArgs, *, params: Params | None = None) -> Rounded:
    """Round every weight to the nearest code of its scale. Zeros stay zeros."""
    params = observe_weight(weight, args) if params is None else params
    return Rounded(fake_quantize(weight, params, args), params)


def gptq(
    weight: Tensor,
    hessian: Tensor,
    args: QuantizationArgs,
    *,
    mask: Tensor | None = None,
    params: Params | None = None,
    damping: float = 0.01,
    static_groups: bool = True,
    tell: NoteCallback = lambda text: None,
) -> Rounded:
    """Round a weight `[rows, columns]` so that the outputs for the observed inputs change least.

    Where `mask` is False the result is exactly zero, and only the other weights compensate errors.
    `params` default to those of the observer of `args`. With `static_groups=False`, the scales of a
    group are computed when its first column is due, from weights that already compensate earlier
    errors. `tell` is called with a note for each deviation: raised damping, dead inputs.
    """
    _check(weight, hessian, args, mask)
    order = _column_order(hessian, args)
    groups_follow = args.actorder is ActivationOrdering.GROUP and _is_grouped(args)
    if groups_follow and params is not None:
        raise ConfigError("params cannot be given with actorder 'group', which forms the groups")
    if not static_groups and (params is not None or not _supports_dynamic_groups(args)):
        raise ConfigError(
            "static_groups=False requires strategy 'group', no params and no actorder 'weight'"
        )
    ordered = weight[:, order]
    if params is None:
        params = observe_weight(ordered if groups_follow else weight, args)
    width = group_width(args, weight.shape[1])
    positions = torch.arange(weight.shape[1], device=weight.device)
    groups = ((positions if groups_follow else order) // width).tolist()
    upper = factor_hessian(hessian.float()[order][:, order], damping=damping, tell=tell)
    sweep = Sweep.start(ordered.T.float().contiguous(), upper, width=width)
    grid = Grid.from_params(params, args, weight.shape[0])
    keep = None if mask is None else mask[:, order].T.contiguous()

    def finish(column: int) -> Tensor:
        if not static_groups and column % width == 0:
            group = slice(column, column + width)
            current = sweep.columns[group] if keep is None else sweep.columns[group] * keep[group]
            grid.refit(groups[column], current)
        rounded = grid.round(sweep.columns[column], groups[column])
        return rounded if keep is None else rounded.where(keep[column], 0.0)

    columns = sweep.run(finish)
    inverse = order.argsort()
    if not static_groups:
        params = grid.to_params(params)
    if groups_follow:
        params = replace(params, g_idx=(inverse // width).int())
    return Rounded(columns[inverse].T.contiguous().to(weight.dtype), params)


@dataclass
class Grid:
    """Scale and optional zero point of each group of columns and each row."""

    scale: Tensor
    zero_point: Tensor | None
    args: QuantizationArgs
    dtype: torch.dtype
    """Dtype of the stored scales, to which values are rounded."""

    @classmethod
    def from_params(cls, params: Params, args: QuantizationArgs, rows: int) -> "Grid":
        """Expand params to one entry per row."""
        scale = params.scale.float()
        if params.global_scale is not None:
            scale = scale / params.global_scale.float()
        channel_args = replace(
            args,
            strategy=QuantizationStrategy.CHANNEL,
            group_size=None,
            block_structure=None,
            actorder=None,
        )
        height = args.block_structure[0] if args.block_structure else rows

        def expand(x: Tensor) -> Tensor:
            table = x.reshape(-1, x.shape[-1]) if x.dim() > 1 else x.reshape(1, -1)
            if len(table) < rows:
                table = table.repeat_interleave(height, dim=0)[:rows]
            return table.T.contiguous()

        zero = None if params.zero_point is None else expand(params.zero_point.float())
        return cls(expand(scale), zero, channel_args, params.scale.dtype)

    def round(self, x: Tensor, group: int) -> Tensor:
        """Round the values of one column to the grid of its group."""
        zero = None if self.zero_point is None else self.zero_point[group]
        rounded = fake_quantize(x, Params(self.scale[group], zero), self.args)
        return rounded if self.dtype is torch.float32 else rounded.to(self.dtype).float()

    def refit(self, group: int, weights: Tensor) -> None:
        """Recompute the scales of a group from its weights `[columns, rows]`."""
        params = observe_weight(weights.T.to(self.dtype), self.args)
        self.scale[group] = params.scale[:, 0].float()
        if self.zero_point is not None and params.zero_point is not None:
            self.zero_point[group] = params.zero_point[:, 0].float()

    def to_params(self, like: Params) -> Params:
        """Return the scales as params with the dtypes of `like`."""
        zero = self.zero_point
        return replace(
            like,
            scale=self.scale.T.contiguous().to(like.scale.dtype),
            zero_point=None
            if zero is None or like.zero_point is None
            else zero.T.contiguous().to(like.zero_point.dtype),
        )


def group_width(args: QuantizationArgs, columns: int) -> int:
    """Return how many adjacent columns of a weight share a scale."""
    if args.block_structure:
        return args.block_structure[1]
    return args.group_size if args.group_size and args.group_size > 0 else columns


def _check(weight: Tensor, hessian: Tensor, args: QuantizationArgs, mask: Tensor | None) -> None:
    check_weight(weight, args)
    if weight.dim() != 2:
        raise ConfigError(f"GPTQ expects a matrix, got shape {tuple(weight.shape)}")
    columns = weight.shape[1]
    if hessian.shape != (columns, columns):
        raise ConfigError(
            f"expected a Hessian of shape {(columns, columns)}, got {tuple(hessian.shape)}"
        )
    if not torch.isfinite(hessian).all():
        raise ConfigError("NaN or infinity in the Hessian; check the calibration data")
    if mask is not None and (mask.shape != weight.shape or mask.dtype is not torch.bool):
        raise ConfigError(
            f"expected a bool mask of shape {tuple(weight.shape)},"
            f" got {mask.dtype} of shape {tuple(mask.shape)}"
        )


def _column_order(hessian: Tensor, args: QuantizationArgs) -> Tensor:
    """Return the columns in the order in which they are rounded."""
    if args.actorder is None:
        return torch.arange(len(hessian), device=hessian.device)
    return hessian.diagonal().argsort(descending=True, stable=True)


def _is_grouped(args: QuantizationArgs) -> bool:
    return args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def _supports_dynamic_groups(args: QuantizationArgs) -> bool:
    is_plain = args.strategy is QuantizationStrategy.GROUP
    return is_plain and args.actorder is not ActivationOrdering.WEIGHT
