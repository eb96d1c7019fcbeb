"""Apply a recipe in one shot: run the model on calibration data, without training."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from slimtensors import layerwise
from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import ConfigError, MismatchError, SlimError, describe_problems
from slimtensors.layerwise.allocation import find_unmatched_targets
from slimtensors.layerwise.inputs import Layer, collect_layers
from slimtensors.layerwise.report import summarize_missing_inputs
from slimtensors.layerwise.smoothing import find_norms
from slimtensors.quantization import QuantizationConfig, targets
from slimtensors.quantization.group_sizes import FittedConfig
from slimtensors.quantization.layers import (
    find_empty_layers,
    find_output_layers,
    list_class_names,
    list_weights,
)
from slimtensors.quantization.state import LayerPlan
from slimtensors.quantization.state import Report as QuantizationReport
from slimtensors.quantization.targets import matches_any
from slimtensors.recipe.calibration import Batch
from slimtensors.recipe.modifiers import (
    AWQ,
    GPTQ,
    LINEAR,
    OUTPUT,
    ConstantPruning,
    Modifier,
    NormMapping,
    PruningModifier,
    QuantizationModifier,
    Quantize,
    SmoothQuant,
    SparseGPT,
    TrainingModifier,
    Wanda,
    resolve_ignore,
)
from slimtensors.recipe.recipe import Recipe, modifier_name
from slimtensors.recipe.report import Step, UnchangedLayer
from slimtensors.storage import StrPath
from slimtensors.tensor import to_cpu

Start = Callable[[str], layerwise.Progress | None]
"""Called with the name of each modifier; returns the progress callback of its layers."""

_SPARSE = 0.05
"""Share of zeros from which on the zeros of a layer must be preserved."""


def apply_recipe(
    model: nn.Module,
    recipe: Recipe,
    batches: Sequence[Batch] = (),
    *,
    work: StrPath | None = None,
    start: Start = lambda name: None,
) -> tuple[Step, ...]:
    """Prune and quantize a model in place and return the result of each modifier.

    Existing and new zeros stay zero until the end, which is checked after every modifier. With a
    `work` folder, an interrupted run resumes after the last finished layer.
    """
    check_recipe(recipe, has_data=bool(batches))
    check_targets(recipe, model)
    zeros = _PreservedZeros()
    zeros.record(collect_layers(model).values())
    steps: list[Step] = []
    smoothing: SmoothQuant | None = None
    for i, modifier in enumerate(recipe.modifiers):
        if isinstance(modifier, SmoothQuant):
            smoothing = modifier  # applied together with the quantizing modifier that follows
            continue
        name = modifier_name(modifier)
        folder = None if work is None else Path(work, f"{i:02d}-{name}")
        context = _StepContext(batches, folder, start(name))
        started = time.perf_counter()
        try:
            if isinstance(modifier, QuantizationModifier):
                step = _quantize(model, modifier, smoothing, context)
            elif isinstance(modifier, PruningModifier):
                step = _prune(model, modifier, context)
            elif isinstance(modifier, ConstantPruning):
                layers = layerwise.fitting_layers(model, modifier.targets, modifier.ignore)
                zeros.record(layers.values(), min_share=0)
                step = Step(name)
            else:
                raise ConfigError("requires training: use slimtensors.transformers.train")
        except SlimError as error:
            raise type(error)(f"{name}: {error}") from error
        zeros.check(collect_layers(model).values(), name)
        zeros.record(collect_layers(model).values())
        steps.append(replace(step, seconds=time.perf_counter() - started))
    return tuple(steps)


def check_recipe(recipe: Recipe, *, has_data: bool) -> None:
    """Raise if a recipe requires training, requires missing data, or is inconsistent."""
    for stage in recipe.stages:
        if stage.run_type == "train":
            raise ConfigError(f"{stage.name}_stage: requires train, not oneshot")
    for i, modifier in enumerate(recipe.modifiers):
        name = modifier_name(modifier)
        if isinstance(modifier, TrainingModifier):
            raise ConfigError(f"{name}: requires training; use train, or another modifier")
        if needs_data(modifier) and not has_data:
            raise ConfigError(f"{name}: needs calibration data: pass dataset=...")
        if isinstance(modifier, SmoothQuant) and not _quantizing_names(recipe.modifiers[i:]):
            raise ConfigError(f"{name}: must be followed by a quantizing modifier")
    has_smoothing = any(isinstance(each, SmoothQuant) for each in recipe.modifiers)
    if has_smoothing and any(isinstance(each, AWQ) for each in recipe.modifiers):
        raise ConfigError("SmoothQuant and AWQ cannot be combined; use one of them")
    if len(names := _quantizing_names(recipe.modifiers)) > 1:
        raise ConfigError(
            f"{' and '.join(names)}: a model can be quantized only once;"
            " use one modifier with several groups"
        )


def _quantizing_names(modifiers: Iterable[Modifier]) -> list[str]:
    return [modifier_name(m) for m in modifiers if isinstance(m, QuantizationModifier)]


def check_targets(recipe: Recipe, model: nn.Module) -> None:
    """Raise if modifiers do not fit the model, with all problems, before any work is done."""
    problems: list[str] = []
    for modifier in recipe.modifiers:
        try:
            if isinstance(modifier, QuantizationModifier):
                check_quantizable(model, make_config(model, modifier))
            if isinstance(modifier, PruningModifier):
                _check_finite(_find_layers(model, modifier).values())
            elif isinstance(modifier, ConstantPruning):
                layerwise.fitting_layers(model, modifier.targets, modifier.ignore)
            elif isinstance(modifier, SmoothQuant | AWQ):
                _resolve_mappings(model, modifier.mappings)
        except ConfigError as error:
            name = modifier_name(modifier)
            problems += [f"{name}: {line}" for line in str(error).splitlines()]
        except SlimError as error:
            raise type(error)(f"{modifier_name(modifier)}: {error}") from error
    if problems:
        raise ConfigError("\n".join(problems))


def plan_quantization(model: nn.Module, config: QuantizationConfig) -> list[LayerPlan]:
    """Return how a config would quantize the layers of a model; raise if it cannot."""
    return [layer.plan for layer in targets.find_layers(model, config, _SilentReport())]


def check_quantizable(model: nn.Module, config: QuantizationConfig) -> None:
    """Raise if a config does not fit a model, or if weights to quantize are not finite."""
    found = targets.find_layers(model, config, _SilentReport())
    modules = {id(each.module) for each in found if each.plan.scheme.weights is not None}
    _check_finite(each for each in collect_layers(model).values() if id(each.module) in modules)


def _check_finite(layers: Iterable[Layer]) -> None:
    """Raise if weights contain NaN or infinity, with all of them."""
    problem = "NaN or infinity in the weight; repair it, or add the layer to ignore"
    found = [
        (layer.name, problem)
        for layer in layers
        if not all(_is_finite(weight) for weight in layer.matrices)
    ]
    if found:
        raise ConfigError(describe_problems(found))


def _is_finite(x: Tensor) -> bool:
    wide = x.float() if x.dtype.itemsize == 1 else x  # torch cannot check 8-bit floats
    return bool(wide.isfinite().all())


def find_unchanged(
    model: nn.Module, recipe: Recipe, steps: Iterable[Step]
) -> tuple[UnchangedLayer, ...]:
    """Return the linear layers that no step changed, with the reason."""
    changed = {layer.name for step in steps for layer in step.layers}
    ignore = {name for modifier in recipe.modifiers for name in getattr(modifier, "ignore", ())}
    reasons = find_output_layers(model) if OUTPUT in ignore else {}
    reasons |= dict.fromkeys(find_empty_layers(model), "empty")
    found = []
    for name, layer in collect_layers(model).items():
        classes = list_class_names(layer.module)
        if name in changed or LINEAR not in classes:
            continue
        module = name if layer.weight.parameter == "weight" else name.rpartition(".")[0]
        reason = reasons.get(module)
        if reason is None:
            is_ignored = any(matches_any(ignore, each, classes) for each in {name, module})
            reason = "ignored" if is_ignored else "not targeted"
        found.append(UnchangedLayer(name, layer.parameter.numel(), reason))
    return (*found, *_find_unsupported(model))


def _find_unsupported(model: nn.Module) -> Iterator[UnchangedLayer]:
    """Yield the layers that are linear by the name of their class only."""
    for name, module in model.named_modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        if LINEAR not in kind or not isinstance(weight, Tensor) or list_weights(module):
            continue
        if weight.dim() in (2, 3):
            yield UnchangedLayer(name, weight.numel(), f"{kind} is not supported")


def needs_data(modifier: Modifier) -> bool:
    """Return True if a modifier requires calibration data."""
    if isinstance(modifier, Quantize):
        return modifier.config.needs_data
    return isinstance(modifier, Wanda | SparseGPT | GPTQ | AWQ | SmoothQuant)


def make_config(model: nn.Module, modifier: QuantizationModifier) -> QuantizationConfig:
    """Return the config of a modifier for a model: with its output layers, and fitting groups."""
    return _fit_config(model, modifier).config


def _fit_config(model: nn.Module, modifier: QuantizationModifier) -> FittedConfig:
    ignore = resolve_ignore(model, modifier.config.ignore)
    return targets.fit_config(model, replace(modifier.config, ignore=ignore))


@dataclass(frozen=True)
class _StepContext:
    """Data, work folder and progress callback of one modifier."""

    batches: Sequence[Batch]
    folder: Path | None
    progress: layerwise.Progress | None


def _prune(model: nn.Module, modifier: PruningModifier, context: _StepContext) -> Step:
    layers = _find_layers(model, modifier)
    reports = layerwise.prune_model(
        model,
        _allocate_shares(model, layers, modifier, context.batches),
        method=_pruning_method(modifier, has_data=bool(context.batches)),
        structure=modifier.structure,
        calibration=context.batches,
        folder=context.folder,
        progress=context.progress,
    )
    unmatched = [name for name in find_unmatched_targets(model, modifier.ignore) if name != OUTPUT]
    notes = [f"ignore: {name!r} matches nothing in this model" for name in unmatched]
    notes += summarize_missing_inputs(reports)
    return Step(modifier_name(modifier), reports, tuple(notes), modifier.structure.name)


def _find_layers(model: nn.Module, modifier: PruningModifier) -> dict[str, Layer]:
    ignore = resolve_ignore(model, modifier.ignore)
    return layerwise.find_layers(model, modifier.targets, ignore, structure=modifier.structure)


def _pruning_method(modifier: PruningModifier, *, has_data: bool) -> layerwise.PruningMethod:
    if isinstance(modifier, SparseGPT):
        return layerwise.SparseGPT(modifier.block_size, modifier.dampening_frac)
    if isinstance(modifier, Wanda):
        return layerwise.Wanda()
    return layerwise.Magnitude(has_data)


def _allocate_shares(
    model: nn.Module,
    layers: Mapping[str, Layer],
    modifier: PruningModifier,
    batches: Sequence[Batch],
) -> dict[str, float]:
    sparsity = modifier.sparsity
    if isinstance(sparsity, Mapping):
        return layerwise.per_target(layers, sparsity)
    if isinstance(sparsity, tuple):
        return layerwise.per_block(model, layers, sparsity)
    if isinstance(modifier, Wanda | SparseGPT) and modifier.sparsity_profile is not None:
        return layerwise.by_outliers(
            model,
            layers,
            sparsity,
            batches=batches,
            times=modifier.owl_m,
            limit=modifier.owl_lmbda,
        )
    return dict.fromkeys(layers, sparsity)


def _quantize(
    model: nn.Module,
    modifier: QuantizationModifier,
    smoothing: SmoothQuant | None,
    context: _StepContext,
) -> Step:
    method: layerwise.QuantizationMethod = layerwise.RTN(bool(context.batches))
    if isinstance(modifier, GPTQ):
        method = layerwise.GPTQ(modifier.dampening_frac, modifier.static_groups)
    fitted = _fit_config(model, modifier)
    report = layerwise.quantize_model(
        model,
        fitted.config,
        calibration=context.batches,
        method=method,
        smoothing=_smoothing_method(model, modifier, smoothing),
        folder=context.folder,
        progress=context.progress,
    )
    return Step(modifier_name(modifier), report.layers, (*fitted.notes, *report.notes))


def _smoothing_method(
    model: nn.Module, modifier: QuantizationModifier, smoothing: SmoothQuant | None
) -> layerwise.Smoothing | None:
    """Return the smoothing of a quantizing modifier: AWQ's own, or an earlier SmoothQuant."""
    if isinstance(modifier, AWQ):
        return layerwise.AWQ(modifier.steps, _resolve_mappings(model, modifier.mappings))
    if smoothing is None:
        return None
    norms = _resolve_mappings(model, smoothing.mappings)
    if smoothing.ignore:
        norms = tuple(find_norms(model)) if norms is None else norms
        norms = tuple(name for name in norms if not matches_any(smoothing.ignore, name, ()))
    return layerwise.SmoothQuant(smoothing.smoothing_strength, norms)


def _resolve_mappings(model: nn.Module, mappings: Sequence[NormMapping]) -> tuple[str, ...] | None:
    """Return the names of the norms in mappings; None if there are no mappings.

    The readers of a norm are detected when the model runs; here, mappings are only checked.
    """
    if not mappings:
        return None
    all_norms = find_norms(model)
    modules = [name for name, _ in model.named_modules()]
    norms: list[str] = []
    for mapping in mappings:
        matches = [name for name in all_norms if matches_any([mapping.smooth_layer], name, ())]
        if not matches:
            raise ConfigError(f"mappings: {mapping.smooth_layer!r} matches no norm of the model")
        for target in mapping.balance_layers:
            if not any(matches_any([target], name, ()) for name in modules):
                raise ConfigError(f"mappings: {target!r} matches no layer of the model")
        norms += matches
    return tuple(dict.fromkeys(norms))


class _PreservedZeros:
    """Positions of zeros that every modifier must preserve, one bit per weight."""

    def __init__(self) -> None:
        self._masks: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def record(self, layers: Iterable[Layer], *, min_share: float = _SPARSE) -> None:
        """Record the zeros of layers in which their share is above `min_share`."""
        for layer in layers:
            weight = to_cpu(layer.parameter.data)
            zeros = count_zeros(weight)
            if zeros.zero + zeros.negative > min_share * zeros.items:
                self._masks[layer.name] = np.packbits((weight == 0).flatten().numpy())

    def check(self, layers: Iterable[Layer], modifier: str) -> None:
        """Raise if a modifier made a recorded zero nonzero."""
        for layer in layers:
            if (packed := self._masks.get(layer.name)) is None:
                continue
            weight = to_cpu(layer.parameter.data).flatten()
            zeros: Tensor = torch.from_numpy(np.unpackbits(packed, count=len(weight))).bool()
            if changed := int(weight[zeros].ne(0).sum()):
                raise MismatchError(
                    f"{layer.name}: {modifier} changed {changed} pruned weights; this is a bug,"
                    " and nothing was saved"
                )


class _SilentReport(QuantizationReport):
    """Discards notes, which are logged when the layers are quantized."""

    def note(self, text: str) -> None:
        """Do nothing."""


__all__ = ["apply_recipe", "check_recipe"]
