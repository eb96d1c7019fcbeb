"""Make weights and inputs easier to quantize: what one is multiplied by, the other is divided by.

A norm and the layers that read it compute the same as before, up to rounding, when the norm's
weight is divided by a scale and the columns of theirs are multiplied by it. Zeros stay zeros.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.layerwise.engine import Stack
from slimtensors.layerwise.gptq import rtn
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.layerwise.inputs import Inputs, Layer, layers_of
from slimtensors.tensor import ceil_div

_ROWS = 256


class Smoothing(Protocol):
    """A way to choose the scale."""

    name: ClassVar[str]

    @property
    def norms(self) -> Sequence[str] | None:
        """Names of the norms that may change; all, if it does not say."""
        ...

    def scale(self, inputs: Hessian, readers: Sequence[Layer]) -> Tensor:
        """Return by what to divide each input of these layers."""
        ...


@dataclass(frozen=True)
class SmoothQuant:
    """Share the burden of large inputs between inputs and weights (Xiao et al., 2022)."""

    name: ClassVar[str] = "smoothquant"
    exponent: float = 0.5
    """0 leaves it all to the inputs, 1 to the weights."""
    norms: Sequence[str] | None = None

    def scale(self, inputs: Hessian, readers: Sequence[Layer]) -> Tensor:
        """Return `inputs^exponent / weights^(1 - exponent)`, of the largest of each column."""
        weights = torch.stack([each.matrix.float().abs().amax(0) for each in readers]).amax(0)
        return _balanced(inputs.largest**self.exponent / weights ** (1 - self.exponent))


@dataclass(frozen=True)
class AWQ:
    """Search for the scale that lets rounded weights do least harm (after Lin et al., 2023)."""

    name: ClassVar[str] = "awq"
    steps: int = 20
    norms: Sequence[str] | None = None

    def scale(self, inputs: Hessian, readers: Sequence[Layer]) -> Tensor:
        """Return the best power of the inputs' size; to leave everything as it is, is tried too."""
        hessian = inputs.mean()
        size = hessian.diagonal().sqrt()
        scales = [_balanced(size ** (i / self.steps)) for i in range(self.steps + 1)]
        return min(scales, key=lambda scale: sum(_harm(each, scale, hessian) for each in readers))


def divide_norm(norm: nn.Module, scale: Tensor, *, offset: float) -> None:
    """Let a norm give its outputs divided by `scale`; it multiplies by `offset + weight`."""
    weight, bias = norm.weight, getattr(norm, "bias", None)
    assert isinstance(weight, Tensor)
    weight.data.copy_((weight.float() + offset) / scale - offset)
    if isinstance(bias, Tensor):
        bias.data.copy_(bias.float() / scale)


def multiply_columns(layer: Layer, scale: Tensor) -> None:
    """Let a layer take inputs that were divided by `scale`."""
    layer.put(layer.matrix.float() * scale)


def _balanced(scale: Tensor) -> Tensor:
    """Keep a scale around one; inputs or weights that are always zero need none."""
    usable = torch.isfinite(scale) & (scale > 0)
    scale = scale.where(usable, 1.0)
    low, high = torch.aminmax(scale[usable] if usable.any() else scale)
    return (scale / (low * high).sqrt()).where(usable, 1.0)


def _harm(layer: Layer, scale: Tensor, hessian: Tensor) -> float:
    weight = layer.matrix.float()
    weight = weight[:: ceil_div(len(weight), _ROWS)]  # a sample of the rows is enough to compare
    if layer.args is None:
        return 0.0
    return output_error(rtn(weight * scale, layer.args).weight / scale - weight, hessian)


_OFFSETS = (0.0, 1.0)
"""Most norms multiply by their weight, those of Gemma by one more than it."""


def norms_of(module: nn.Module, *, prefix: str) -> dict[str, nn.Module]:
    """Return the norms in a module that multiply by a weight."""
    return {
        name: each
        for name, each in module.named_modules(prefix=prefix)
        if type(each).__name__.endswith("Norm") and isinstance(_weight(each), Tensor)
    }


def smooth_block(
    stack: Stack, block: str, inputs: Iterable[Inputs], smoothing: Smoothing
) -> tuple[list[str], list[str]]:
    """Smooth what reads a norm and is to be quantized; return parameters changed, and notes.

    The block is run before and after: where its outputs differ, because something else reads the
    norm as well, everything is left as it was, and noted. Hessians change with what they are of.
    """
    module = stack.blocks[block]
    layers, norms = layers_of(module, prefix=block), norms_of(module, prefix=block)
    names = {id(p): name for name, p in module.named_parameters(prefix=block)}
    changed: list[str] = []
    notes: list[str] = []
    for each in inputs:
        readers = [layers[name] for name, _ in each.readers]
        if each.source is None or not any(layer.args for layer in readers):
            continue
        if smoothing.norms is not None and each.source not in smoothing.norms:
            continue
        norm = norms[each.source]
        scale = smoothing.scale(each.hessian, readers)
        if _is_kept(stack, block, norm, readers, scale):
            each.hessian.divide(scale)
            touched = [*norm.parameters(recurse=False), *(layer.parameter for layer in readers)]
            changed += [names[id(parameter)] for parameter in touched]
        else:
            known = ", ".join(name for name, _ in each.readers)
            notes.append(f"{each.source}: not smoothed, as not only {known} reads it")
    return changed, notes


def _is_kept(
    stack: Stack, block: str, norm: nn.Module, readers: Sequence[Layer], scale: Tensor
) -> bool:
    """Move `scale` from the norm to its readers, and tell whether the block computes the same."""
    parameters = [*norm.parameters(recurse=False), *(layer.parameter for layer in readers)]
    before = [p.data.clone() for p in parameters]
    want = _outputs(stack, block)
    allowed = 1e-8 if want.dtype is torch.float32 else 1e-3  # of squares; rounded weights cost some
    for offset in _OFFSETS:
        divide_norm(norm, scale, offset=offset)
        for layer in readers:
            multiply_columns(layer, scale)
        off = (_outputs(stack, block) - want).float().square().sum()
        if off <= allowed * want.float().square().sum():
            return True
        for parameter, old in zip(parameters, before, strict=True):
            parameter.data.copy_(old)
    return False


def _outputs(stack: Stack, block: str) -> Tensor:
    return next(stack.run(block))


def _weight(norm: nn.Module) -> object:
    weight = getattr(norm, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.dim() == 1 else None
