"""Choose the codes of one layer, be it a matrix or a stack of experts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slimtensors.errors import ConfigError, SlimError
from slimtensors.quantization.affine import Params
from slimtensors.quantization.algorithms.hessian import Hessian, output_error
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.quantization.algorithms.methods import RTN, Method
from slimtensors.quantization.algorithms.report import LayerReport
from slimtensors.quantization.algorithms.rtn import Rounded, rtn
from slimtensors.quantization.args import QuantizationArgs

Hessians = Mapping[tuple[str, int], Hessian]
"""What was seen to flow into each matrix, by its layer's name and its number there."""

_ROWS = 128
"""How many rows of a weight are enough to tell how its outputs change."""


@dataclass(frozen=True)
class _Done:
    """One matrix, on its grid."""

    result: Rounded
    method: str
    tokens: int
    notes: Sequence[str]
    errors: Tensor
    """Mean square of the outputs, of our error in them, and of rounding to nearest."""


def round_layer(layer: Layer, method: Method, hessians: Hessians) -> tuple[Rounded, LayerReport]:
    """Return the layer's weight on its grid, and how that went."""
    args = layer.args
    assert args is not None, "only layers that are to be quantized come here"
    try:
        done = [
            _round(matrix, method, hessians.get((layer.name, i)), args)
            for i, matrix in enumerate(layer.matrices)
        ]
        results = [each.result for each in done]
        whole = results[0] if layer.matrix.dim() == 2 else _stacked(results)
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    size, ours, nearest = torch.stack([each.errors for each in done]).sum(0).tolist()
    used = {each.method for each in done}
    return whole, LayerReport(
        layer.name,
        method=method.name if method.name in used else RTN.name,
        error=ours / size if size else None,
        nearest_error=nearest / size if size else None,
        tokens=sum(each.tokens for each in done),
        notes=_gathered([each.notes for each in done]),
    )


def _round(weight: Tensor, method: Method, seen: Hessian | None, args: QuantizationArgs) -> _Done:
    notes: list[str] = []
    if seen is None or not seen.largest.any():
        if method.needs_inputs:
            notes.append("nothing but zeros, if anything, came in: rounded to nearest")
        return _Done(rtn(weight, args), RTN.name, 0, notes, torch.zeros(3))
    hessian = seen.mean()
    result = method.round(weight, hessian, args, tell=notes.append)
    nearest = result if method.name == RTN.name else rtn(weight, args)
    errors = _errors(weight, result.weight, nearest.weight, hessian)
    return _Done(result, method.name, seen.tokens, notes, errors)


def _errors(weight: Tensor, ours: Tensor, nearest: Tensor, hessian: Tensor) -> Tensor:
    rows = slice(None, None, -(-len(weight) // _ROWS))
    exact = weight[rows].float()
    off = [exact, exact - ours[rows].float(), exact - nearest[rows].float()]
    return torch.tensor([output_error(x, hessian) for x in off])


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


def _gathered(notes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Say of which experts each note is."""
    if len(notes) == 1:
        return tuple(notes[0])
    which: dict[str, list[str]] = {}
    for i, told in enumerate(notes):
        for text in told:
            which.setdefault(text, []).append(str(i))
    return tuple(f"expert {', '.join(own)} of {len(notes)}: {x}" for x, own in which.items())
