"""Choose the codes of one layer, be it a matrix or a stack of experts."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, SingularError, SlimError
from slimtensors.quantization.affine import Params
from slimtensors.quantization.algorithms.change import Change
from slimtensors.quantization.algorithms.hessian import Hessian
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.quantization.algorithms.methods import RTN, Method
from slimtensors.quantization.algorithms.report import LayerReport
from slimtensors.quantization.algorithms.rtn import Rounded, rtn
from slimtensors.quantization.algorithms.telling import Told, layer_report
from slimtensors.quantization.args import QuantizationArgs

Hessians = Mapping[tuple[str, int], Hessian]
"""What was seen to flow into each matrix, by its layer's name and its number there."""


def round_layer(layer: Layer, method: Method, hessians: Hessians) -> tuple[Rounded, LayerReport]:
    """Return the layer's weight on its grid, and how that went."""
    args = layer.args
    assert args is not None, "only layers that are to be quantized come here"
    begin = time.perf_counter()
    try:
        done = [
            _round(matrix, method, hessians.get((layer.name, i)), args)
            for i, matrix in enumerate(layer.matrices)
        ]
        results = [result for result, _ in done]
        whole = results[0] if layer.matrix.dim() == 2 else _stacked(results)
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    return whole, layer_report(layer.name, method.name, [told for _, told in done], begin=begin)


def _round(
    weight: Tensor, method: Method, seen: Hessian | None, args: QuantizationArgs
) -> tuple[Rounded, Told]:
    notes: list[str] = []
    nearest = rtn(weight, args)
    if seen is None or not seen.largest.any():
        if method.name != RTN.name:
            notes.append("nothing but zeros, if anything, came in: rounded to nearest")
        return nearest, Told(RTN.name, notes=notes)
    hessian = seen.mean()
    result, used = nearest, RTN.name
    if method.name != RTN.name:
        try:
            result, used = method.round(weight, hessian, args, tell=notes.append), method.name
        except SingularError as error:
            notes.append(f"{error}: rounded to nearest")
    return result, Told(
        used,
        seen.tokens,
        notes,
        Change.between(weight, result.weight, hessian),
        Change.between(weight, nearest.weight, hessian),
    )


def _stacked(done: Sequence[Rounded]) -> Rounded:
    """Return the experts as one."""
    all_params = [each.params for each in done]
    if any(params.g_idx is not None for params in all_params):
        raise ConfigError("stacked experts have no columns in common to order; use actorder weight")

    def stack(key: str) -> Tensor | None:
        parts = [getattr(params, key) for params in all_params]
        if parts[0] is None:
            return None
        return torch.stack([x.reshape(-1, x.shape[-1]) if x.dim() else x for x in parts])

    scale = stack("scale")
    assert scale is not None
    params = Params(scale, stack("zero_point"), stack("global_scale"))
    return Rounded(torch.stack([each.weight for each in done]), params)
