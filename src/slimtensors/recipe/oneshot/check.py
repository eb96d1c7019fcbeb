"""Whether a recipe can be done in one shot, before anything is done."""

from torch import nn

from slimtensors.errors import ConfigError, SlimError
from slimtensors.pruning import find_layers, fitting_layers
from slimtensors.quantization import plans
from slimtensors.quantization.state import Report
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
from slimtensors.recipe.oneshot.quantize import config_for
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
    """Raise if a modifier is for something that the model does not have, or cannot be done to it.

    What would be found out only after hours of work is found out here.
    """
    for modifier in recipe.modifiers:
        try:
            if isinstance(modifier, Quantizing):
                plans.find_layers(model, config_for(model, modifier), _Unheard())
            if isinstance(modifier, Pruning):
                find_layers(model, modifier.targets, modifier.ignore, structure=modifier.structure)
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


class _Unheard(Report):
    """Notes that are told when it is done, not when it is checked."""

    def note(self, text: str) -> None:
        """Leave it."""


def _quantizing(modifiers: tuple[Modifier, ...]) -> list[Modifier]:
    return [each for each in modifiers if isinstance(each, Quantizing)]
