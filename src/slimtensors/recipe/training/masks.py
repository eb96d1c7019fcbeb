"""The masks of a stage that trains: which modifier prunes which weights, and when."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from slimtensors.errors import ConfigError, MismatchError
from slimtensors.quantization.layers import classes_of
from slimtensors.quantization.layers import weights_of as quantizable
from slimtensors.quantization.targets import is_target
from slimtensors.recipe.modifiers import (
    ConstantPruning,
    GradualMagnitudePruning,
    Modifier,
    MovementPruning,
    name_of,
)
from slimtensors.recipe.training.gradual import GradualMasks
from slimtensors.recipe.training.held import HeldMasks
from slimtensors.recipe.training.movement import MovementMasks
from slimtensors.recipe.training.ranking import by_layer, of_all_layers
from slimtensors.recipe.training.schedule import Schedule

Gradual = GradualMagnitudePruning | MovementPruning
_POWERS = {"linear": 1, "cubic": 3}


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

    def __init__(self, parts: Mapping[str, HeldMasks]) -> None:
        self._parts = dict(parts)

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
    for number, modifier in enumerate(modifiers):
        if not isinstance(modifier, ConstantPruning | GradualMagnitudePruning | MovementPruning):
            continue
        weights = weights_of(model, modifier)
        for name in weights:
            if name in owners:
                raise ConfigError(
                    f"{name}: is pruned by {owners[name]} and by {name_of(modifier)}; ignore it in"
                    " one of them"
                )
            owners[name] = name_of(modifier)
        parts[f"{number}_{name_of(modifier)}"] = _part(modifier, weights, held, length)
    others = {name: model.get_parameter(name) for name in held if name not in owners}
    return StageMasks({**parts, **({"held": HeldMasks(others, held)} if others else {})})


def weights_of(model: nn.Module, modifier: ConstantPruning | Gradual) -> dict[str, nn.Parameter]:
    """Return the weights of the layers that a modifier is for; raise if there are none."""
    found = {}
    for name, layer in model.named_modules():
        if not quantizable(layer):
            continue
        classes = classes_of(layer)
        is_meant = is_target(modifier.targets, name, classes)
        if is_meant and not is_target(modifier.ignore, name, classes):
            weight = getattr(layer, "weight", None)
            if not isinstance(weight, nn.Parameter) or weight.dim() < 2:
                raise ConfigError(f"{name}: has no matrix of weights to prune; ignore it")
            found[f"{name}.weight"] = weight
    if not found:
        targets = ", ".join(modifier.targets)
        raise ConfigError(f"{name_of(modifier)}: no layer of the model is one of {targets}")
    return found


def _part(
    modifier: ConstantPruning | Gradual,
    weights: Mapping[str, nn.Parameter],
    held: Mapping[str, Tensor],
    length: Length,
) -> HeldMasks:
    if isinstance(modifier, ConstantPruning):
        zeros = HeldMasks.of_zeros(weights).masks
        return HeldMasks(weights, {name: held.get(name, mask) for name, mask in zeros.items()})
    allowed = {
        name: held.get(name, weight.new_ones(weight.shape).bool())
        for name, weight in weights.items()
    }
    for name, weight in weights.items():
        try:
            modifier.structure.check(weight.shape[0], weight[0].numel())
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from error
    schedule = _schedule(modifier, length)
    ranking = (of_all_layers if modifier.apply_globally else by_layer)(modifier.structure)
    if isinstance(modifier, MovementPruning):
        return MovementMasks(
            weights,
            allowed,
            schedule=schedule,
            ranking=ranking,
            rate=modifier.score_learning_rate,
        )
    return GradualMasks(weights, allowed, schedule=schedule, ranking=ranking)


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
