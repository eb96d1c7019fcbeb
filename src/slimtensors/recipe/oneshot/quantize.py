"""Run a modifier that quantizes."""

from dataclasses import replace

from torch import nn

from slimtensors.quantization import QuantizationConfig, algorithms, quantize_model
from slimtensors.quantization.layers import classes_of
from slimtensors.quantization.targets import is_target
from slimtensors.recipe.modifiers import GPTQ, Quantizing, SmoothQuant, name_of
from slimtensors.recipe.modifiers.fields import OUTPUT
from slimtensors.recipe.oneshot.how import How
from slimtensors.recipe.oneshot.smoothing import smoothing_of
from slimtensors.recipe.report import Step


def quantize(model: nn.Module, modifier: Quantizing, before: SmoothQuant | None, how: How) -> Step:
    """Quantize a model in place, smoothed before if that is asked for."""
    report = quantize_model(
        model,
        config_for(model, modifier),
        calibration=how.batches,
        method=_method(modifier, how),
        smoothing=smoothing_of(model, modifier, before),
        folder=how.folder,
        progress=how.progress,
    )
    return Step(name_of(modifier), report.layers, report.notes)


def config_for(model: nn.Module, modifier: Quantizing) -> QuantizationConfig:
    """Return the config of a modifier; that a model has no output layer to ignore is no mistake."""
    config = modifier.config
    modules = model.named_modules()
    if any(is_target([OUTPUT], name, classes_of(module)) for name, module in modules):
        return config
    return replace(config, ignore=[name for name in config.ignore if name != OUTPUT])


def _method(modifier: Quantizing, how: How) -> algorithms.Method:
    if isinstance(modifier, GPTQ):
        return algorithms.GPTQ(modifier.dampening_frac, modifier.static_groups)
    return algorithms.RTN(bool(how.batches))
