"""Round-to-nearest and GPTQ."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.layerwise.hessian import Tell, factor, pulls
from slimtensors.layerwise.sweep import Grid, Sweep, group_width
from slimtensors.quantization.affine import Params, check_weight, fake_quantize
from slimtensors.quantization.args import ActivationOrdering, QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.observers import observe_weight


class Rounded(NamedTuple):
    """A weight of which every number can be said by a code, and what turns codes into numbers."""

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
    width = group_width(args, weight.shape[1])
    places = torch.arange(weight.shape[1], device=weight.device)
    group_of = (places if groups_follow else order) // width
    sweep = Sweep.of(
        ordered.T.float().contiguous(),
        pulls(factor(hessian.float()[order][:, order], damping=damping, tell=tell)),
        width=width,
    )
    grid = Grid.of(params, args, weight.shape[0])
    groups = group_of.tolist()
    keep = None if mask is None else mask[:, order].T.contiguous()

    def settle(column: int) -> Tensor:
        if not static_groups and column % width == 0:
            here = slice(column, column + width)
            known = sweep.aims[here] if keep is None else sweep.aims[here] * keep[here]
            grid.renew(groups[column], known)
        rounded = grid.round(sweep.aims[column], groups[column])
        return rounded if keep is None else rounded.where(keep[column], 0.0)

    settled = sweep.run(settle)
    back = order.argsort()
    if not static_groups:
        params = grid.params(params)
    if groups_follow:
        params = replace(params, g_idx=(back // width).int())
    return Rounded(settled[back].T.contiguous().to(weight.dtype), params)


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


def _is_grouped(args: QuantizationArgs) -> bool:
    return args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.TENSOR_GROUP)


def _can_wait(args: QuantizationArgs) -> bool:
    is_plain = args.strategy is QuantizationStrategy.GROUP
    return is_plain and args.actorder is not ActivationOrdering.WEIGHT
