"""Whether a recipe can be done in one shot, before anything is done."""

from torch import nn

from slimtensors.errors import ConfigError, SlimError
from slimtensors.pruning import find_layers, fitting_layers
from slimtensors.recipe.modifiers import (
    AWQ,
    GPTQ,
    ConstantPruning,
    Modifier,
    Pruning,
    Quantize,
    Quantizing,
    SmoothQuant,
    SparseGPT,
    Training,
    Wanda,
    name_of,
)
from slimtensors.recipe.oneshot.smoothing import find_norms
from slimtensors.recipe.recipe import Recipe


def check_recipe(recipe: Recipe, *, has_data: bool) -> None:
    """Raise if a recipe needs training, or data where there is none, or makes no sense."""
    for stage in recipe.stages:
        if stage.run_type == "train":
            raise ConfigError(f"{stage.name}_stage: is for train, not for oneshot")
    for i, modifier in enumerate(recipe.modifiers):
        name = name_of(modifier)
        if isinstance(modifier, Training):
            raise ConfigError(f"{name}: needs training; use train, or another modifier")
        if needs_data(modifier) and not has_data:
            raise ConfigError(f"{name}: needs calibration data, and there is none: pass dataset=")
        if isinstance(modifier, SmoothQuant) and not _quantizing(recipe.modifiers[i:]):
            raise ConfigError(f"{name}: prepares for a quantizing modifier, and none follows")
    if len(quantizing := _quantizing(recipe.modifiers)) > 1:
        names = " and ".join(map(name_of, quantizing))
        raise ConfigError(f"{names}: a model is quantized once; use one, with several groups")


def check_targets(recipe: Recipe, model: nn.Module) -> None:
    """Raise if a modifier is for something that the model does not have."""
    for modifier in recipe.modifiers:
        try:
            if isinstance(modifier, Pruning):
                find_layers(model, modifier.targets, modifier.ignore)
            elif isinstance(modifier, ConstantPruning):
                fitting_layers(model, modifier.targets, modifier.ignore)
            elif isinstance(modifier, SmoothQuant | AWQ):
                find_norms(model, modifier.mappings)
        except SlimError as error:
            raise type(error)(f"{name_of(modifier)}: {error}") from error


def needs_data(modifier: Modifier) -> bool:
    """Tell whether a modifier has to run the model."""
    if isinstance(modifier, Quantize):
        return modifier.config.needs_data
    return isinstance(modifier, Wanda | SparseGPT | GPTQ | AWQ | SmoothQuant)


def _quantizing(modifiers: tuple[Modifier, ...]) -> list[Modifier]:
    return [each for each in modifiers if isinstance(each, Quantizing)]
