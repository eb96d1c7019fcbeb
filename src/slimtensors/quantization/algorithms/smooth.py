"""Apply smoothing to the norms of a block, where that changes nothing."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from slimtensors.quantization.algorithms.blocks import Stack
from slimtensors.quantization.algorithms.layers import Layer, layers_of
from slimtensors.quantization.algorithms.smoothing import (
    Smoothing,
    divide_norm,
    multiply_columns,
)
from slimtensors.quantization.algorithms.watch import Inputs

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
