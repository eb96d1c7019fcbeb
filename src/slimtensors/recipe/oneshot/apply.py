"""Do to a model what a recipe says, modifier by modifier."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from torch import nn

from slimtensors.calibration import Batch
from slimtensors.container import StrPath
from slimtensors.errors import ConfigError, SlimError
from slimtensors.pruning import fitting_layers
from slimtensors.quantization.algorithms import Progress
from slimtensors.quantization.algorithms.layers import layers_of
from slimtensors.recipe.modifiers import (
    ConstantPruning,
    Modifier,
    Pruning,
    Quantizing,
    SmoothQuant,
    name_of,
)
from slimtensors.recipe.oneshot.check import check_recipe, check_targets
from slimtensors.recipe.oneshot.held import HeldZeros
from slimtensors.recipe.oneshot.how import How
from slimtensors.recipe.oneshot.prune import prune
from slimtensors.recipe.oneshot.quantize import quantize
from slimtensors.recipe.recipe import Recipe
from slimtensors.recipe.report import Step

Start = Callable[[str], Progress | None]
"""Called with the name of a modifier when it begins; returns what hears of its layers."""


def apply_recipe(
    model: nn.Module,
    recipe: Recipe,
    batches: Sequence[Batch] = (),
    *,
    work: StrPath | None = None,
    start: Start = lambda name: None,
) -> tuple[Step, ...]:
    """Prune and quantize a model in place, as a recipe says, and tell what was done.

    Zeros that are there or come about stay to the end: that is checked after every modifier. With a
    folder for `work`, a run that was killed goes on after the last layer that was finished.
    """
    check_recipe(recipe, has_data=bool(batches))
    check_targets(recipe, model)
    held = HeldZeros()
    held.hold(layers_of(model).values())
    steps: list[Step] = []
    smooth: SmoothQuant | None = None
    for i, modifier in enumerate(recipe.modifiers):
        name = name_of(modifier)
        if isinstance(modifier, SmoothQuant):
            smooth = modifier  # done in the same pass as what it prepares for
            continue
        folder = None if work is None else Path(work, f"{i:02d}-{name}")
        how = How(batches, folder, start(name))
        begin = time.perf_counter()
        try:
            step = _do(model, modifier, smooth, held, how)
        except SlimError as error:
            raise type(error)(f"{name}: {error}") from error
        held.check(layers_of(model).values(), name)
        held.hold(layers_of(model).values())
        steps.append(replace(step, seconds=time.perf_counter() - begin))
    return tuple(steps)


def _do(
    model: nn.Module, modifier: Modifier, smooth: SmoothQuant | None, held: HeldZeros, how: How
) -> Step:
    if isinstance(modifier, Quantizing):
        return quantize(model, modifier, smooth, how)
    if isinstance(modifier, Pruning):
        return prune(model, modifier, how)
    if isinstance(modifier, ConstantPruning):
        layers = fitting_layers(model, modifier.targets, modifier.ignore)
        held.hold(layers.values(), from_share=0)
        return Step(name_of(modifier))
    raise ConfigError("needs training: pass the recipe to slimtensors.transformers.train")
