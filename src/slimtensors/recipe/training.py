"""Train a model by a recipe: the masks of a stage, and distillation losses."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from slimtensors.errors import ConfigError, MismatchError
from slimtensors.layerwise.allocation import find_layers, fitting_layers
from slimtensors.layerwise.inputs import Layer
from slimtensors.layerwise.report import LayerReport
from slimtensors.recipe.masks import (
    GradualMasks,
    HeldMasks,
    MovementMasks,
    Schedule,
    by_layer,
    of_all_layers,
    relative_magnitude,
)
from slimtensors.recipe.modifiers import (
    ConstantPruning,
    GradualMagnitudePruning,
    Modifier,
    MovementPruning,
)
from slimtensors.recipe.recipe import modifier_name
from slimtensors.recipe.report import Step


def divergence(
    student: Tensor, teacher: Tensor, *, temperature: float, where: Tensor | None = None
) -> Tensor:
    """Return the mean KL divergence of two sets of logits, whose last dimension is the classes.

    Both are divided by the temperature, and the result is multiplied by its square, so that
    gradients stay as large as at 1 (Hinton et al., 2015). `where` tells which rows count.
    """
    if student.shape != teacher.shape:
        shapes = f"{list(student.shape)}, the teacher's {list(teacher.shape)}"
        raise MismatchError(f"the model's logits are {shapes}; choose a teacher of the same kind")
    mine = functional.log_softmax(student.float() / temperature, -1)
    wanted = functional.log_softmax(teacher.float() / temperature, -1)
    rows = functional.kl_div(mine, wanted, reduction="none", log_target=True).sum(-1)
    if where is not None:
        rows = rows[where]
    return rows.mean() * temperature**2


def answers_divergence(
    student: Mapping[str, Tensor],
    teacher: Mapping[str, Tensor],
    *,
    temperature: float,
    attention: Tensor | None = None,
) -> Tensor:
    """Return the divergence of all logits that two models answered with, added up.

    `attention` is one where a token is not padding; it counts for logits of tokens.
    """
    if not isinstance(student, Mapping) or not isinstance(teacher, Mapping):
        raise MismatchError(
            "answers have no names, by which logits are found; use return_dict=True"
        )
    names = [name for name in student if name.endswith("logits")]
    if not names or not set(names) <= set(teacher):
        have = f"the model answers with {', '.join(student)}, the teacher with {', '.join(teacher)}"
        raise MismatchError(f"there are no logits to learn from: {have}")
    parts = []
    for name in names:
        logits = student[name]
        is_of_tokens = attention is not None and logits.shape[:-1] == attention.shape
        where = attention.bool() if is_of_tokens and attention is not None else None
        parts.append(divergence(logits, teacher[name], temperature=temperature, where=where))
    return torch.stack(parts).sum()


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
        own = modifier_name(modifier)
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
    own = modifier_name(modifier)
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
            f"{modifier_name(modifier)}: ends after {modifier.end:g} epochs, but training lasts"
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


__all__ = [
    "GradualMasks",
    "HeldMasks",
    "MovementMasks",
    "Schedule",
    "answers_divergence",
    "divergence",
]
