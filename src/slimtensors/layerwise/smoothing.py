"""Smoothing: move scale from the inputs of layers to their weights before quantization.

A norm and the layers that read it compute the same as before, up to rounding, if the norm's weight
is divided by a scale and the columns of the layers are multiplied by it. Zeros stay zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.layerwise.gptq import rtn
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.layerwise.inputs import Layer, collect_layers
from slimtensors.layerwise.survey import iterate_tensors
from slimtensors.layerwise.walk import Unit
from slimtensors.tensor import ceil_div

_SAMPLED_ROWS = 256
"""Rows of a weight on which scales are compared at most."""

_OFFSETS = (0.0, 1.0)
"""Most norms multiply by their weight, those of Gemma by one plus their weight."""


class Smoothing(Protocol):
    """A method that chooses the scale of a norm."""

    name: ClassVar[str]

    @property
    def norms(self) -> Sequence[str] | None:
        """Names of the norms to smooth; None for all."""
        ...

    def scale(self, inputs: Hessian, readers: Sequence[Layer]) -> Tensor:
        """Return the divisor of each input of these layers."""
        ...


@dataclass(frozen=True)
class SmoothQuant:
    """Balance the ranges of inputs and weights (Xiao et al., 2022)."""

    name: ClassVar[str] = "smoothquant"
    exponent: float = 0.5
    """0 leaves the whole range to the inputs, 1 to the weights."""
    norms: Sequence[str] | None = None

    def scale(self, inputs: Hessian, readers: Sequence[Layer]) -> Tensor:
        """Return `inputs^exponent / weights^(1 - exponent)` of the largest value per column."""
        weights = torch.stack([each.matrix.float().abs().amax(0) for each in readers]).amax(0)
        return _normalize(inputs.largest**self.exponent / weights ** (1 - self.exponent))


@dataclass(frozen=True)
class AWQ:
    """Search for the scale with the smallest error after rounding (after Lin et al., 2023)."""

    name: ClassVar[str] = "awq"
    steps: int = 20
    norms: Sequence[str] | None = None

    def scale(self, inputs: Hessian, readers: Sequence[Layer]) -> Tensor:
        """Return the best power of the input magnitudes; power 0 leaves everything unchanged."""
        hessian = inputs.mean()
        size = hessian.diagonal().sqrt()
        scales = [_normalize(size ** (i / self.steps)) for i in range(self.steps + 1)]
        return min(
            scales,
            key=lambda scale: sum(_rounding_error(each, scale, hessian) for each in readers),
        )


def find_norms(module: nn.Module, *, prefix: str = "") -> dict[str, nn.Module]:
    """Return the norms in a module that multiply by a weight vector, by name."""
    return {
        name: each
        for name, each in module.named_modules(prefix=prefix)
        if type(each).__name__.endswith("Norm") and _has_weight_vector(each)
    }


def smooth_block(unit: Unit, smoothing: Smoothing) -> tuple[dict[str, Tensor], list[str]]:
    """Smooth the norms that quantized layers read; return the changed parameters, and notes.

    The block runs before and after. If its outputs differ, because something else reads the norm
    too, the norm is left unchanged and a note is added.
    """
    module, block = unit.module, unit.name
    assert module is not None, "only blocks are smoothed"
    layers, norms = collect_layers(module, prefix=block), find_norms(module, prefix=block)
    names = {id(p): name for name, p in module.named_parameters(prefix=block)}
    changed: dict[str, Tensor] = {}
    notes: list[str] = []
    # Smoothing rescales all readers of a norm, including layers that are not quantized.
    for each in unit.record_inputs(layers.values(), norms):
        readers = [layers[name] for name, _ in each.readers]
        if each.source is None or not any(layer.args for layer in readers):
            continue
        if smoothing.norms is not None and each.source not in smoothing.norms:
            continue
        norm = norms[each.source]
        scale = smoothing.scale(each.hessian, readers)
        if _move_scale(unit, norm, readers, scale):
            changed |= {names[id(p)]: p.data for p in _parameters(norm, readers)}
        else:
            reader_names = ", ".join(name for name, _ in each.readers)
            notes.append(
                f"{each.source}: not smoothed, because not only {reader_names} depend on it"
            )
    return changed, notes


def _move_scale(unit: Unit, norm: nn.Module, readers: Sequence[Layer], scale: Tensor) -> bool:
    """Move a scale from a norm to its readers; undo it and return False if outputs differ."""
    parameters = _parameters(norm, readers)
    originals = [p.data.clone() for p in parameters]
    expected = _first_output(unit)
    # Relative tolerance of squares; weights of less precision are rounded once more.
    tolerance = 1e-8 if expected.dtype is torch.float32 else 1e-3
    for offset in _OFFSETS:
        _divide_norm(norm, scale, offset=offset)
        for layer in readers:
            layer.set_weight(layer.matrix.float() * scale)
        error = (_first_output(unit) - expected).float().square().sum()
        if error <= tolerance * expected.float().square().sum():
            return True
        for parameter, original in zip(parameters, originals, strict=True):
            parameter.data.copy_(original)
    return False


def _parameters(norm: nn.Module, readers: Sequence[Layer]) -> list[nn.Parameter]:
    return [*norm.parameters(recurse=False), *(layer.parameter for layer in readers)]


def _first_output(unit: Unit) -> Tensor:
    result = next(unit.run())
    first: Tensor = result if isinstance(result, Tensor) else next(iterate_tensors(result))
    return first


def _divide_norm(norm: nn.Module, scale: Tensor, *, offset: float) -> None:
    """Divide the outputs of a norm, which multiplies by `offset + weight`, by a scale."""
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    weight.data.copy_((weight.float() + offset) / scale - offset)
    if isinstance(bias, Tensor):
        bias.data.copy_(bias.float() / scale)


def _normalize(scale: Tensor) -> Tensor:
    """Center a scale around one; columns of zero inputs or weights get one."""
    usable = torch.isfinite(scale) & (scale > 0)
    scale = scale.where(usable, 1.0)
    low, high = torch.aminmax(scale[usable] if usable.any() else scale)
    return (scale / (low * high).sqrt()).where(usable, 1.0)


def _rounding_error(layer: Layer, scale: Tensor, hessian: Tensor) -> float:
    if layer.args is None:
        return 0.0
    weight = layer.matrix.float()
    weight = weight[:: ceil_div(len(weight), _SAMPLED_ROWS)]
    return output_error(rtn(weight * scale, layer.args).weight / scale - weight, hessian)


def _has_weight_vector(norm: nn.Module) -> bool:
    weight = getattr(norm, "weight", None)
    return isinstance(weight, Tensor) and weight.dim() == 1
