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
    rank_globally,
    rank_per_layer,
    relative_magnitude,
)
from slimtensors.recipe.modifiers import (
    ConstantPruning,
    GradualMagnitudePruning,
    Modifier,
    MovementPruning,
    resolve_ignore,
)
from slimtensors.recipe.recipe import modifier_name
from slimtensors.recipe.report import Step

GradualPruning = GradualMagnitudePruning | MovementPruning

_POWERS = {"linear": 1, "cubic": 3}
_INITIAL_SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "zeros": torch.zeros_like,
    "magnitude": relative_magnitude,
}


def divergence(
    student: Tensor, teacher: Tensor, *, temperature: float, where: Tensor | None = None
) -> Tensor:
    """Return the mean KL divergence of two sets of logits, with classes in the last dimension.

    Logits are divided by the temperature and the result is multiplied by its square, so that the
    size of gradients does not depend on it (Hinton et al., 2015). `where` selects rows.
    """
    if student.shape != teacher.shape:
        shapes = f"{list(student.shape)} and {list(teacher.shape)}"
        raise MismatchError(f"shapes of the model's and the teacher's logits differ: {shapes}")
    predictions = functional.log_softmax(student.float() / temperature, -1)
    targets = functional.log_softmax(teacher.float() / temperature, -1)
    rows = functional.kl_div(predictions, targets, reduction="none", log_target=True).sum(-1)
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
    """Return the sum of the divergences of all logits in the outputs of two models.

    `attention` is 1 for tokens and 0 for padding, and applies to logits of tokens.
    """
    if not isinstance(student, Mapping) or not isinstance(teacher, Mapping):
        raise MismatchError("model outputs must be mappings; use return_dict=True")
    names = [name for name in student if name.endswith("logits")]
    if not names or not set(names) <= set(teacher):
        raise MismatchError(
            f"no common logits: the model returns {', '.join(student)},"
            f" the teacher {', '.join(teacher)}"
        )
    parts = []
    for name in names:
        logits = student[name]
        where = None
        if attention is not None and logits.shape[:-1] == attention.shape:
            where = attention.bool()
        parts.append(divergence(logits, teacher[name], temperature=temperature, where=where))
    return torch.stack(parts).sum()


@dataclass(frozen=True)
class TrainingLength:
    """Length of training in optimizer steps."""

    steps: int
    steps_per_epoch: int

    def to_steps(self, epochs: float) -> int:
        """Convert epochs to steps."""
        return round(epochs * self.steps_per_epoch)


class StageMasks:
    """All masks of a training stage."""

    def __init__(self, parts: Mapping[str, HeldMasks], steps: Sequence[Step] = ()) -> None:
        self._parts = dict(parts)
        self.steps = tuple(steps)
        """Pruned layers of each modifier."""

    @property
    def masks(self) -> dict[str, Tensor]:
        """Masks by weight name."""
        return {name: mask for part in self._parts.values() for name, mask in part.masks.items()}

    @contextmanager
    def during(self, optimizer: Optimizer) -> Iterator[None]:
        """Apply the masks at every step of an optimizer, within the context."""
        with ExitStack() as stack:
            for part in self._parts.values():
                stack.enter_context(part.during(optimizer))
            yield

    def check(self) -> None:
        """Raise if a masked weight is not zero."""
        for part in self._parts.values():
            part.check()

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming."""
        return {name: part.state_dict() for name, part in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        if state.keys() != self._parts.keys():
            raise MismatchError(
                f"the checkpoint has masks of {', '.join(state) or 'no modifiers'},"
                f" expected {', '.join(self._parts) or 'none'}"
            )
        for name, part in self._parts.items():
            part.load_state_dict(state[name])


def build_masks(
    model: nn.Module,
    modifiers: Sequence[Modifier],
    initial: Mapping[str, Tensor],
    length: TrainingLength,
) -> StageMasks:
    """Return the masks of a stage: those of its modifiers, and `initial` masks of earlier stages.

    Weights that an initial mask prunes stay pruned.
    """
    owners: dict[str, str] = {}
    parts: dict[str, HeldMasks] = {}
    steps: list[Step] = []
    for i, modifier in enumerate(modifiers):
        part: HeldMasks
        structure = None
        if isinstance(modifier, ConstantPruning):
            part = _build_constant(modifier, model, initial)
        elif isinstance(modifier, GradualPruning):
            part = _build_gradual(modifier, model, initial, length)
            structure = modifier.structure.name
        else:
            continue
        modifier_id = modifier_name(modifier)
        for name in owners.keys() & part.masks:
            raise ConfigError(
                f"{name} is pruned by both {owners[name]} and {modifier_id}; ignore it in one"
            )
        owners |= dict.fromkeys(part.masks, modifier_id)
        parts[f"{i}_{modifier_id}"] = part
        layers = [LayerReport(name.removesuffix(".weight"), modifier_id) for name in part.masks]
        steps.append(Step(modifier_id, tuple(layers), structure=structure))
    others = {name: model.get_parameter(name) for name in initial if name not in owners}
    if others:
        parts["held"] = HeldMasks(others, initial)
    return StageMasks(parts, steps)


def key_by_parameter(layers: Iterable[Layer]) -> dict[str, Layer]:
    """Return layers by the names of their weights in the model."""
    return {
        f"{layer.name}.weight" if layer.weight.parameter == "weight" else layer.name: layer
        for layer in layers
    }


def _build_constant(
    modifier: ConstantPruning, model: nn.Module, initial: Mapping[str, Tensor]
) -> HeldMasks:
    layers = key_by_parameter(fitting_layers(model, modifier.targets, modifier.ignore).values())
    weights = {name: layer.parameter for name, layer in layers.items()}
    masks = {name: initial.get(name, weight.detach() != 0) for name, weight in weights.items()}
    return HeldMasks(weights, masks)


def _build_gradual(
    modifier: GradualPruning,
    model: nn.Module,
    initial: Mapping[str, Tensor],
    length: TrainingLength,
) -> GradualMasks:
    structure = modifier.structure
    ignore = resolve_ignore(model, modifier.ignore)
    found = find_layers(model, modifier.targets, ignore, structure=structure)
    layers = key_by_parameter(found.values())
    weights = {name: layer.parameter for name, layer in layers.items()}
    masks = {
        name: initial.get(name, torch.ones_like(weight, dtype=torch.bool))
        for name, weight in weights.items()
    }
    schedule = _build_schedule(modifier, length)
    if modifier.apply_globally:
        ranking = rank_globally(structure)
    else:
        views = {name: layer.weight for name, layer in layers.items()}
        ranking = rank_per_layer(structure, views)
    if isinstance(modifier, GradualMagnitudePruning):
        return GradualMasks(weights, masks, schedule=schedule, ranking=ranking)
    return MovementMasks(
        weights,
        masks,
        schedule=schedule,
        ranking=ranking,
        rate=modifier.score_learning_rate,
        first=_INITIAL_SCORES[modifier.score_init],
    )


def _build_schedule(modifier: GradualPruning, length: TrainingLength) -> Schedule:
    start = length.to_steps(modifier.start)
    end = length.steps if modifier.end is None else length.to_steps(modifier.end)
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
        1 if every is None else max(1, length.to_steps(every)),
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
