"""Which norms a recipe smooths, and how."""

from collections.abc import Sequence

from torch import nn

from slimtensors.errors import ConfigError
from slimtensors.quantization import algorithms
from slimtensors.quantization.algorithms.smooth import norms_of
from slimtensors.quantization.targets import is_target
from slimtensors.recipe.modifiers import AWQ, Mapped, Quantizing, SmoothQuant


def smoothing_of(
    model: nn.Module, modifier: Quantizing, before: SmoothQuant | None
) -> algorithms.Smoothing | None:
    """Return what smooths for a quantizing modifier: itself, or the one before it."""
    if isinstance(modifier, AWQ):
        if before is not None:
            raise ConfigError("SmoothQuant and AWQ smooth the same norms; use one of them")
        return algorithms.AWQ(modifier.steps, find_norms(model, modifier.mappings))
    if before is None:
        return None
    norms = find_norms(model, before.mappings)
    if before.ignore:
        norms = tuple(norms_of(model, prefix="")) if norms is None else norms
        norms = tuple(name for name in norms if not is_target(before.ignore, name, ()))
    return algorithms.SmoothQuant(before.smoothing_strength, norms)


def find_norms(model: nn.Module, mappings: Sequence[Mapped]) -> tuple[str, ...] | None:
    """Return the names of the norms in mappings; none if there are no mappings.

    Who reads a norm is seen when the model runs; here it is only checked that there are such
    layers, and that what is to be smoothed is a norm.
    """
    if not mappings:
        return None
    norms = norms_of(model, prefix="")
    modules = [name for name, _ in model.named_modules()]
    found: list[str] = []
    for mapping in mappings:
        own = [name for name in norms if is_target([mapping.smooth_layer], name, ())]
        if not own:
            raise ConfigError(f"mappings: {mapping.smooth_layer!r} fits no norm of the model")
        for target in mapping.balance_layers:
            if not any(is_target([target], name, ()) for name in modules):
                raise ConfigError(f"mappings: {target!r} fits no layer of the model")
        found += own
    return tuple(dict.fromkeys(found))
