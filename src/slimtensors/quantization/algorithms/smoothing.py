"""Make weights and inputs easier to quantize: what one is multiplied by, the other is divided by.

A norm and the layers that read it compute the same as before, up to rounding, when the norm's
weight is divided by a scale and the columns of theirs are multiplied by it. Zeros stay zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.quantization.algorithms.hessian import Hessian, output_error
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.quantization.algorithms.rtn import rtn

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
    weight = weight[:: -(-len(weight) // _ROWS)]  # a sample of the rows is enough to compare
    if layer.args is None:
        return 0.0
    return output_error(rtn(weight * scale, layer.args).weight / scale - weight, hessian)
