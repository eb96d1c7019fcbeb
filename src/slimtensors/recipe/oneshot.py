"""Apply a recipe in one shot: the model is run, not trained."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from slimtensors import layerwise
from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import ConfigError, MismatchError, SlimError
from slimtensors.layerwise.allocation import find_layers, fitting_layers, unmatched_targets
from slimtensors.layerwise.engine import Progress
from slimtensors.layerwise.inputs import Layer, collect_layers
from slimtensors.layerwise.smoothing import find_norms
from slimtensors.quantization import QuantizationConfig, plans, quantize_model
from slimtensors.quantization.layers import classes_of
from slimtensors.quantization.plans import is_target
from slimtensors.quantization.state import Report
from slimtensors.recipe.calibration import Batch
from slimtensors.recipe.modifiers import (
    AWQ,
    GPTQ,
    OUTPUT,
    ConstantPruning,
    Mapped,
    Modifier,
    Pruning,
    Quantize,
    Quantizing,
    SmoothQuant,
    SparseGPT,
    Training,
    Wanda,
)
from slimtensors.recipe.recipe import Recipe, modifier_name
from slimtensors.recipe.report import Step
from slimtensors.storage import StrPath
from slimtensors.tensor import to_cpu


@dataclass(frozen=True)
class StepContext:
    """Data to run the model on, a folder for what is finished, and who hears of it."""

    batches: Sequence[Batch] = ()
    folder: Path | None = None
    progress: Progress | None = None


_SPARSE = 0.05
"""The share of zeros from which on they are there on purpose."""


class PreservedZeros:
    """Where each layer was zero, in a bit per weight."""

    def __init__(self) -> None:
        self._masks: dict[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {}

    def hold(self, layers: Iterable[Layer], *, from_share: float = _SPARSE) -> None:
        """Hold the zeros of layers that have so many of them."""
        for layer in layers:
            weight = to_cpu(layer.parameter.data)
            zeros = count_zeros(weight)
            if zeros.zero + zeros.negative > from_share * zeros.items:
                self._masks[layer.name] = np.packbits((weight == 0).flatten().numpy())

    def check(self, layers: Iterable[Layer], modifier: str) -> None:
        """Raise if a modifier gave a layer weights where it had zeros."""
        for layer in layers:
            if (packed := self._masks.get(layer.name)) is None:
                continue
            back = int(to_cpu(layer.parameter.data).flatten()[_unpacked(packed, layer)].ne(0).sum())
            if back:
                raise MismatchError(
                    f"{layer.name}: {modifier} gave back {back} weights that were pruned; this is"
                    " a fault of this library, and nothing was saved"
                )


def _unpacked(packed: "np.ndarray[tuple[int], np.dtype[np.uint8]]", layer: Layer) -> Tensor:
    return torch.from_numpy(np.unpackbits(packed, count=layer.parameter.numel())).bool()


def _run_pruning(model: nn.Module, modifier: Pruning, how: StepContext) -> Step:
    """Prune a model in place."""
    layers = layerwise.find_layers(
        model, modifier.targets, modifier.ignore, structure=modifier.structure
    )
    reports = layerwise.prune_model(
        model,
        _shares(model, layers, modifier, how),
        method=_pruning_method(modifier, how),
        structure=modifier.structure,
        calibration=how.batches,
        folder=how.folder,
        progress=how.progress,
    )
    missing = [name for name in unmatched_targets(model, modifier.ignore) if name != OUTPUT]
    notes = tuple(f"ignore: {name!r} fits nothing in this model" for name in missing)
    return Step(modifier_name(modifier), reports, notes, modifier.structure.name)


def _pruning_method(modifier: Pruning, how: StepContext) -> layerwise.PruningMethod:
    if isinstance(modifier, SparseGPT):
        return layerwise.SparseGPT(modifier.block_size, modifier.dampening_frac)
    return (
        layerwise.Wanda() if isinstance(modifier, Wanda) else layerwise.Magnitude(bool(how.batches))
    )


def _shares(
    model: nn.Module, layers: Mapping[str, Layer], modifier: Pruning, how: StepContext
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
            batches=how.batches,
            times=modifier.owl_m,
            limit=modifier.owl_lmbda,
        )
    return dict.fromkeys(layers, sparsity)


def smoothing_of(
    model: nn.Module, modifier: Quantizing, before: SmoothQuant | None
) -> layerwise.Smoothing | None:
    """Return what smooths for a quantizing modifier: itself, or the one before it."""
    if isinstance(modifier, AWQ):
        if before is not None:
            raise ConfigError("SmoothQuant and AWQ smooth the same norms; use one of them")
        return layerwise.AWQ(modifier.steps, resolve_mappings(model, modifier.mappings))
    if before is None:
        return None
    norms = resolve_mappings(model, before.mappings)
    if before.ignore:
        norms = tuple(find_norms(model, prefix="")) if norms is None else norms
        norms = tuple(name for name in norms if not is_target(before.ignore, name, ()))
    return layerwise.SmoothQuant(before.smoothing_strength, norms)


def resolve_mappings(model: nn.Module, mappings: Sequence[Mapped]) -> tuple[str, ...] | None:
    """Return the names of the norms in mappings; none if there are no mappings.

    Who reads a norm is seen when the model runs; here it is only checked that there are such
    layers, and that what is to be smoothed is a norm.
    """
    if not mappings:
        return None
    norms = find_norms(model, prefix="")
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


def _run_quantizing(
    model: nn.Module, modifier: Quantizing, before: SmoothQuant | None, how: StepContext
) -> Step:
    """Quantize a model in place, smoothed before if that is asked for."""
    report = quantize_model(
        model,
        config_for(model, modifier),
        calibration=how.batches,
        method=_quantization_method(modifier, how),
        smoothing=smoothing_of(model, modifier, before),
        folder=how.folder,
        progress=how.progress,
    )
    return Step(modifier_name(modifier), report.layers, report.notes)


def config_for(model: nn.Module, modifier: Quantizing) -> QuantizationConfig:
    """Return the config of a modifier; that a model has no output layer to ignore is no mistake."""
    config = modifier.config
    modules = model.named_modules()
    if any(is_target([OUTPUT], name, classes_of(module)) for name, module in modules):
        return config
    return replace(config, ignore=[name for name in config.ignore if name != OUTPUT])


def _quantization_method(modifier: Quantizing, how: StepContext) -> layerwise.QuantizationMethod:
    if isinstance(modifier, GPTQ):
        return layerwise.GPTQ(modifier.dampening_frac, modifier.static_groups)
    return layerwise.RTN(bool(how.batches))


def check_recipe(recipe: Recipe, *, has_data: bool) -> None:
    """Raise if a recipe needs training, or data where there is none, or makes no sense."""
    for stage in recipe.stages:
        if stage.run_type == "train":
            raise ConfigError(f"{stage.name}_stage: is for train, not for oneshot")
    for i, modifier in enumerate(recipe.modifiers):
        name = modifier_name(modifier)
        if isinstance(modifier, Training):
            raise ConfigError(f"{name}: needs training; use train, or another modifier")
        if needs_data(modifier) and not has_data:
            raise ConfigError(f"{name}: needs calibration data, and there is none: pass dataset=")
        if isinstance(modifier, SmoothQuant) and not _quantizing(recipe.modifiers[i:]):
            raise ConfigError(f"{name}: prepares for a quantizing modifier, and none follows")
    if len(quantizing := _quantizing(recipe.modifiers)) > 1:
        names = " and ".join(map(modifier_name, quantizing))
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
                resolve_mappings(model, modifier.mappings)
        except SlimError as error:
            raise type(error)(f"{modifier_name(modifier)}: {error}") from error


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
    held = PreservedZeros()
    held.hold(collect_layers(model).values())
    steps: list[Step] = []
    smooth: SmoothQuant | None = None
    for i, modifier in enumerate(recipe.modifiers):
        name = modifier_name(modifier)
        if isinstance(modifier, SmoothQuant):
            smooth = modifier  # done in the same pass as what it prepares for
            continue
        folder = None if work is None else Path(work, f"{i:02d}-{name}")
        how = StepContext(batches, folder, start(name))
        begin = time.perf_counter()
        try:
            step = _do(model, modifier, smooth, held, how)
        except SlimError as error:
            raise type(error)(f"{name}: {error}") from error
        held.check(collect_layers(model).values(), name)
        held.hold(collect_layers(model).values())
        steps.append(replace(step, seconds=time.perf_counter() - begin))
    return tuple(steps)


def _do(
    model: nn.Module,
    modifier: Modifier,
    smooth: SmoothQuant | None,
    held: PreservedZeros,
    how: StepContext,
) -> Step:
    if isinstance(modifier, Quantizing):
        return _run_quantizing(model, modifier, smooth, how)
    if isinstance(modifier, Pruning):
        return _run_pruning(model, modifier, how)
    if isinstance(modifier, ConstantPruning):
        layers = fitting_layers(model, modifier.targets, modifier.ignore)
        held.hold(layers.values(), from_share=0)
        return Step(modifier_name(modifier))
    raise ConfigError("needs training: pass the recipe to slimtensors.transformers.train")


__all__ = ["apply_recipe", "check_recipe"]
