"""Prune one layer, be it a matrix or a stack of experts."""

import time

import torch
from torch import Tensor

from slimtensors.errors import SingularError, SlimError, StatusError
from slimtensors.pruning.methods import Magnitude, Method, Round, Wanda, Wanted, check
from slimtensors.pruning.structure import Structure
from slimtensors.quantization.affine import Params
from slimtensors.quantization.algorithms.change import Change
from slimtensors.quantization.algorithms.grid import Grid, group_width
from slimtensors.quantization.algorithms.hessian import Hessian
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.quantization.algorithms.report import LayerReport
from slimtensors.quantization.algorithms.round import Hessians
from slimtensors.quantization.algorithms.telling import Told, layer_report
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.state import quantization_of


def prune_layer(
    layer: Layer, method: Method, hessians: Hessians, share: float, structure: Structure
) -> tuple[Tensor, LayerReport]:
    """Return the layer's weight with its zeros, and how that went. Zeros that are there stay."""
    begin = time.perf_counter()
    try:
        done = []
        for i, weight in enumerate(layer.matrices):
            held = weight == 0
            want = Wanted(share, structure, held if held.any() else None, _grid(layer, i))
            check(weight, want)
            done.append(_prune(weight, method, hessians.get((layer.name, i)), want))
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    pruned = [weight for weight, _ in done]
    whole = pruned[0] if layer.matrix.dim() == 2 else torch.stack(pruned)
    return whole, layer_report(layer.name, method.name, [told for _, told in done], begin=begin)


def _prune(
    weight: Tensor, method: Method, seen: Hessian | None, want: Wanted
) -> tuple[Tensor, Told]:
    notes: list[str] = []
    simplest = Magnitude().prune(weight, None, want, tell=notes.append)
    if seen is None or not seen.largest.any():
        if method.name != Magnitude.name:
            notes.append("nothing but zeros, if anything, came in: pruned by magnitude")
        return simplest, Told(Magnitude.name, notes=notes)
    hessian, used = seen.mean(), method.name
    try:
        pruned = method.prune(weight, hessian, want, tell=notes.append)
    except SingularError as error:
        notes.append(f"{error}: pruned by wanda")
        pruned, used = Wanda().prune(weight, hessian, want, tell=notes.append), Wanda.name
    return pruned, Told(
        used,
        seen.tokens,
        notes,
        Change.between(weight, pruned, hessian),
        Change.between(weight, simplest, hessian),
    )


def _grid(layer: Layer, i: int) -> Round | None:
    """Return what keeps a weight that is quantized already on its grid."""
    if (args := layer.args) is None:
        return None
    state = quantization_of(layer.module)
    params = None if state is None else state.params.get(layer.weight.parameter)
    if params is None:
        raise StatusError("is quantized, but not by this run; load the model dense")
    if layer.matrix.dim() == 3:
        params = _of_expert(params, i)
    return _rounding(params, args, layer.matrices[i])


def _rounding(params: Params, args: QuantizationArgs, weight: Tensor) -> Round:
    rows, columns = weight.shape
    grid, width = Grid.of(params, args, rows), group_width(args, columns)
    group_of = None if params.g_idx is None else params.g_idx.tolist()

    def round(x: Tensor, column: int) -> Tensor:
        return grid.round(x, column // width if group_of is None else group_of[column])

    return round


def _of_expert(params: Params, i: int) -> Params:
    zero, whole = params.zero_point, params.global_scale
    return Params(
        params.scale[i],
        None if zero is None else zero[i],
        None if whole is None else whole[i],
    )
