"""The masks of a stage that trains: which modifier prunes which weights, and when."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimtensors.errors import ConfigError, MismatchError
from slimtensors.pruning import find_layers, fitting_layers
from slimtensors.quantization.algorithms import LayerReport
from slimtensors.quantization.algorithms.layers import Layer
from slimtensors.recipe.modifiers import (
    ConstantPruning,
    GradualMagnitudePruning,
    Modifier,
    MovementPruning,
    name_of,
)
from slimtensors.recipe.report import Step
from slimtensors.recipe.training.gradual import GradualMasks
from slimtensors.recipe.training.held import HeldMasks
from slimtensors.recipe.training.movement import MovementMasks, relative_magnitude
from slimtensors.recipe.training.ranking import by_layer, of_all_layers
from slimtensors.recipe.training.schedule import Schedule

Gradual = GradualMagnitudePruning | MovementPruning
_POWERS = {"linear": 1, "cubic": 3}
_FIRST_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "magnitude": relative_magnitude,
}


@dataclass(frozen=True)
class Length:
    """How long training is, in steps of the optimizer."""

    steps: int
    steps_per_epoch: int

    def steps_of(self, epochs: float) -> int:
        """Return the steps that some epochs take."""
        return round(epochs * self.steps_per_epoch)


class StageMasks:
    """All masks that hold while a stage trains."""

    def __init__(self, parts: Mapping[str, HeldMasks], steps: Sequence[Step] = ()) -> None:
        self._parts, self._steps = dict(parts), tuple(steps)

    @property
    def masks(self) -> dict[str, Tensor]:
        """Those of each weight that has one."""
        return {name: mask for part in self._parts.values() for name, mask in part.masks.items()}

    @contextmanager
    def during(self, optimizer: Optimizer) -> Iterator[None]:
        """Hold all through every step of an optimizer, until the block ends."""
        with ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.during(optimizer))
            yield

    def steps(self) -> tuple[Step, ...]:
        """Tell which layers were pruned by which modifier."""
        return self._steps

    def check(self) -> None:
        """Raise if a weight that is to be zero is not."""
        for part in self._parts.values():
            part.check()

    def state_dict(self) -> dict[str, Any]:
        """Return what training must know to go on."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        if state.keys() != self._parts.keys():
            have = f"{', '.join(state) or 'none'} there, {', '.join(self._parts) or 'none'} here"
            raise MismatchError(f"the checkpoint is of other pruning modifiers: {have}")
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def masks_of(
    model: nn.Module, modifiers: Sequence[Modifier], held: Mapping[str, Tensor], length: Length
) -> StageMasks:
    """Return what the modifiers of a stage prune or hold, and what was `held` before it."""
    owners: dict[str, str] = {}
    parts: dict[str, HeldMasks] = {}
    steps: list[Step] = []
    for number, modifier in enumerate(modifiers):
        part: HeldMasks
        if isinstance(modifier, ConstantPruning):
            part = _held(modifier, model, held)
        elif isinstance(modifier, GradualMagnitudePruning | MovementPruning):
            part = _gradual(modifier, model, held, length)
        else:
            continue
        own = name_of(modifier)
        for name in owners.keys() & part.masks:
            both = f"{owners[name]} and by {own}"
            raise ConfigError(f"{name}: is pruned by {both}; ignore it in one of them")
        owners |= dict.fromkeys(part.masks, own)
        parts[f"{number}_{own}"] = part
        steps.append(_step(modifier, part))
    others = {name: model.get_parameter(name) for name in held if name not in owners}
    if others:
        parts["held"] = HeldMasks(others, held)
    return StageMasks(parts, steps)


def parameters_of(layers: Iterable[Layer]) -> dict[str, Layer]:
    """Return layers by the names of their weights in the model."""
    return {
        f"{layer.name}.weight" if layer.weight.parameter == "weight" else layer.name: layer
        for layer in layers
    }


def _step(modifier: ConstantPruning | Gradual, part: HeldMasks) -> Step:
    own = name_of(modifier)
    layers = [LayerReport(name.removesuffix(".weight"), own) for name in part.masks]
    structure = None if isinstance(modifier, ConstantPruning) else modifier.structure.name
    return Step(own, tuple(layers), structure=structure)


def _held(modifier: ConstantPruning, model: nn.Module, held: Mapping[str, Tensor]) -> HeldMasks:
    layers = parameters_of(fitting_layers(model, modifier.targets, modifier.ignore).values())
    weights = {name: layer.parameter for name, layer in layers.items()}
    zeros = {name: weight.detach() != 0 for name, weight in weights.items()}
    return HeldMasks(weights, {**zeros, **{name: x for name, x in held.items() if name in zeros}})


def _gradual(
    modifier: Gradual, model: nn.Module, held: Mapping[str, Tensor], length: Length
) -> GradualMasks:
    structure = modifier.structure
    found = find_layers(model, modifier.targets, modifier.ignore, structure=structure)
    layers = parameters_of(found.values())
    weights = {name: layer.parameter for name, layer in layers.items()}
    everything = {
        name: torch.ones_like(weight, dtype=torch.bool) for name, weight in weights.items()
    }
    allowed = {name: held.get(name, mask) for name, mask in everything.items()}
    schedule = _schedule(modifier, length)
    views = {name: layer.weight for name, layer in layers.items()}
    ranking = of_all_layers(structure) if modifier.apply_globally else by_layer(structure, views)
    if isinstance(modifier, GradualMagnitudePruning):
        return GradualMasks(weights, allowed, schedule=schedule, ranking=ranking)
    return MovementMasks(
        weights,
        allowed,
        schedule=schedule,
        ranking=ranking,
        rate=modifier.score_learning_rate,
        first=_FIRST_SCORES[modifier.score_init],
    )


def _schedule(modifier: Gradual, length: Length) -> Schedule:
    start = length.steps_of(modifier.start)
    end = length.steps if modifier.end is None else length.steps_of(modifier.end)
    if end > length.steps:
        epochs = length.steps / length.steps_per_epoch
        raise ConfigError(
            f"{name_of(modifier)}: ends after {modifier.end:g} epochs, but training lasts"
            f" {epochs:g}; train longer, or end earlier"
        )
    every = modifier.update_frequency
    return Schedule(
        min(start, end),
        end,
        modifier.init_sparsity,
        modifier.final_sparsity,
        1 if every is None else max(1, length.steps_of(every)),
        _POWERS[modifier.schedule],
    )
