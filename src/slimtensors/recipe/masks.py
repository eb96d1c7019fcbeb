"""Masks that keep weights at zero during training: constant, gradual, movement."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimtensors.errors import ConfigError, MismatchError
from slimtensors.layerwise.structure import Structure, Unstructured
from slimtensors.quantization.layers import Weight


@dataclass(frozen=True)
class Schedule:
    """Sparsity that grows from step `start` to step `end` of the optimizer."""

    start: int
    end: int
    initial: float
    final: float
    every: int = 1
    """Steps from one change to the next; the last change is always at `end`."""
    power: int = 3
    """Of the curve: 1 is straight, 3 fast first, while much is left (Zhu and Gupta, 2017)."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError(f"a schedule cannot go from step {self.start} to step {self.end}")
        if not 0 <= self.initial <= self.final < 1:
            raise ConfigError(
                f"sparsity must grow, from 0 to less than 1; got {self.initial} to {self.final}"
            )
        if self.every < 1:
            raise ConfigError(f"every: must be a number of steps from 1, got {self.every}")

    def at(self, step: int) -> float:
        """Return the share of weights that are zero after so many steps."""
        if step < self.start:
            return 0.0
        if step >= self.end:
            return self.final
        left = (self.end - step) / (self.end - self.start)
        return self.final + (self.initial - self.final) * left**self.power

    def is_due(self, step: int) -> bool:
        """Tell whether masks change after so many steps."""
        if step == self.end:
            return True
        return self.start <= step < self.end and (step - self.start) % self.every == 0


Ranking = Callable[[Mapping[str, Tensor], float], Mapping[str, Tensor]]
"""Makes masks from scores and the share of zeros."""


def by_layer(structure: Structure, views: Mapping[str, Weight]) -> Ranking:
    """Return a ranking that gives every layer the same share of zeros, in some structure.

    `views` tell how each weight is seen as a matrix.
    """

    def kept(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        return {name: ~_zeros(structure, views[name], x, share) for name, x in scores.items()}

    return kept


def of_all_layers(structure: Structure) -> Ranking:
    """Return a ranking that compares the weights of all layers with each other."""
    if not isinstance(structure, Unstructured):
        raise ConfigError(f"mask_structure {structure.name} cannot be applied globally")

    def kept(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        every = torch.cat([x.flatten() for x in scores.values()])
        mask = ~structure.zeros(every[None], share)[0]
        parts = torch.split(mask, [x.numel() for x in scores.values()])
        return {name: part.view_as(scores[name]) for name, part in zip(scores, parts, strict=True)}

    return kept


def _zeros(structure: Structure, view: Weight, scores: Tensor, share: float) -> Tensor:
    matrix = view.matrix(scores)
    experts = matrix if matrix.dim() == 3 else matrix[None]
    zeros = torch.stack([_zeros_of_matrix(structure, x, share) for x in experts])
    return view.shaped(zeros.view_as(matrix), scores.shape)


def _zeros_of_matrix(structure: Structure, scores: Tensor, share: float) -> Tensor:
    zeros = structure.zeros(scores, share)
    if structure.share is not None and share < structure.share:
        # On the way to 2:4 only the lowest of those go that have to go in the end.
        zeros = Unstructured().zeros(scores.masked_fill(~zeros, torch.inf), share)
    return zeros


class HeldMasks:
    """Weights and the masks that say which of their items are kept; all others are zero.

    Masks do not change here; those that do are kinds of this.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.masks = {
            name: masks[name].to(weight.device, torch.bool) for name, weight in weights.items()
        }
        for name, weight in self.weights.items():
            if self.masks[name].shape != weight.shape:
                shapes = f"{list(self.masks[name].shape)}, the weight {list(weight.shape)}"
                raise MismatchError(f"{name}: the mask is {shapes}")
        self.apply()

    @classmethod
    def of_zeros(cls, weights: Mapping[str, nn.Parameter]) -> Self:
        """Hold the zeros that weights have now."""
        return cls(weights, {name: weight.detach() != 0 for name, weight in weights.items()})

    @contextmanager
    def during(self, optimizer: Optimizer) -> Iterator[Self]:
        """Hold through every step of an optimizer, until the block ends.

        Gradients are masked before they are added up, so that neither their norm nor a moment
        knows of weights that are gone; after a step, weights and all that the optimizer remembers
        of them are masked too.
        """
        with ExitStack() as hooks:
            for name, weight in self.weights.items():
                if not weight.requires_grad:
                    continue
                untyped: Any = weight
                hook = untyped.register_hook(partial(self._mask_gradient, name))
                hooks.callback(hook.remove)
            hooks.callback(optimizer.register_step_post_hook(self._after_step).remove)
            self.apply(optimizer)
            yield self

    @torch.no_grad()
    def apply(self, optimizer: Optimizer | None = None) -> None:
        """Zero what is not kept."""
        for name, weight in self.weights.items():
            gone = ~self.masks[name]
            weight.masked_fill_(gone, 0)  # not a product: that would leave -0.0 and NaN
            state = optimizer.state.get(weight, {}) if optimizer is not None else {}
            for x in state.values():
                if isinstance(x, Tensor) and x.shape == weight.shape:
                    x.masked_fill_(gone, 0)

    def check(self) -> None:
        """Raise if a weight that is to be zero is not."""
        for name, weight in self.weights.items():
            broken = int(weight.detach()[~self.masks[name]].count_nonzero())
            if broken:
                raise MismatchError(f"{name}: {broken} weights that were pruned are not zero")

    def learn(self, name: str, gradient: Tensor) -> None:
        """Look at a gradient before it is masked."""

    def advance(self) -> bool:
        """Go on after a step of the optimizer; tell whether masks have changed."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what training must know to go on."""
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        fill(self.masks, state["masks"], "masks")

    def _mask_gradient(self, name: str, gradient: Tensor) -> Tensor:
        self.learn(name, gradient)
        return gradient.masked_fill(~self.masks[name], 0)

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self.apply(optimizer)
        if self.advance():
            self.apply(optimizer)


def fill(mine: Mapping[str, Tensor], given: Mapping[str, Tensor], part: str) -> None:
    """Copy tensors of a state into those of the same names."""
    if mine.keys() != given.keys():
        name = min(mine.keys() ^ given.keys())
        where = "the checkpoint" if name in given else "this run"
        raise MismatchError(f"{part}: {name} is pruned in {where} only")
    for name, x in mine.items():
        if x.shape != given[name].shape:
            shapes = f"{list(given[name].shape)} in the checkpoint, {list(x.shape)} now"
            raise MismatchError(f"{part}: {name}: {shapes}")
        x.copy_(given[name])


class GradualMasks(HeldMasks):
    """Masks that keep the largest weights, fewer and fewer of them by a schedule."""

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        masks: Mapping[str, Tensor],
        *,
        schedule: Schedule,
        ranking: Ranking,
    ) -> None:
        super().__init__(weights, masks)
        self.schedule, self._ranking = schedule, ranking
        self.step = 0
        self._allowed = {name: mask.clone() for name, mask in self.masks.items()}
        self._renew()
        self.apply()

    def advance(self) -> bool:
        """Count a step, and prune if it is time to."""
        self.step += 1
        return self._renew()

    def scores(self) -> dict[str, Tensor]:
        """Return how much each weight matters."""
        return {name: weight.detach().abs() for name, weight in self.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return what training must know to go on."""
        return {**super().state_dict(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        self.step = state["step"]

    def change(self, masks: Mapping[str, Tensor]) -> None:
        """Take other masks; the caller applies them."""
        self.masks.update(masks)

    @torch.no_grad()
    def _renew(self) -> bool:
        if not self.schedule.is_due(self.step):
            return False
        scores = {name: x.float() for name, x in self.scores().items()}
        # What was pruned before training began ranks below everything, and never comes back.
        lowest = min(x.min() for x in scores.values()) - 1
        ranked = {name: x.where(self._allowed[name], lowest) for name, x in scores.items()}
        kept = self._ranking(ranked, self.schedule.at(self.step))
        self.change({name: mask & self._allowed[name] for name, mask in kept.items()})
        return True


class MovementMasks(GradualMasks):
    """Masks that follow learned scores until the schedule ends, and then stay.

    Scores begin as what `first` makes of the weights, and are learned at a rate of their own. What
    a weight was when it went is kept aside, for it to come back with.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        masks: Mapping[str, Tensor],
        *,
        schedule: Schedule,
        ranking: Ranking,
        rate: float,
        first: Callable[[Tensor], Tensor] = torch.zeros_like,
    ) -> None:
        self._scores = {
            name: nn.Parameter(first(x.detach().float())) for name, x in weights.items()
        }
        self._aside = {name: torch.zeros_like(x.detach()) for name, x in weights.items()}
        self._learner = torch.optim.Adam(self._scores.values(), lr=rate)
        super().__init__(weights, masks, schedule=schedule, ranking=ranking)

    @torch.no_grad()
    def learn(self, name: str, gradient: Tensor) -> None:
        """Add what a gradient says about the scores: lower where it moves weights to zero."""
        if self.step >= self.schedule.end:
            return
        weight = self.weights[name].detach() + self._aside[name]  # where one is zero, the other is
        slope = gradient.float() * weight.float()
        score = self._scores[name]
        score.grad = slope if score.grad is None else score.grad.add_(slope)

    def advance(self) -> bool:
        """Improve the scores, count a step, and choose anew if it is time to."""
        self._learner.step()
        self._learner.zero_grad()
        return super().advance()

    def scores(self) -> dict[str, Tensor]:
        """Return how much each weight matters."""
        return dict(self._scores)

    @torch.no_grad()
    def change(self, masks: Mapping[str, Tensor]) -> None:
        """Take other masks; put weights aside that go, and bring those back that come."""
        for name, mask in masks.items():
            whole = self.weights[name].detach() + self._aside[name]
            self.weights[name].copy_(whole.masked_fill(~mask, 0))
            self._aside[name].copy_(whole.masked_fill_(mask, 0))
        super().change(masks)

    def state_dict(self) -> dict[str, Any]:
        """Return what training must know to go on."""
        scores = {name: x.detach() for name, x in self._scores.items()}
        learner = self._learner.state_dict()
        state = {"scores": scores, "aside": dict(self._aside), "learner": learner}
        return {**super().state_dict(), **state}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""
        super().load_state_dict(state)
        fill(self._scores, state["scores"], "scores")
        fill(self._aside, state["aside"], "aside")
        self._learner.load_state_dict(deepcopy(state["learner"]))  # or both would train on it


def relative_magnitude(weight: Tensor) -> Tensor:
    """Return scores to begin with: magnitudes, in units of the standard deviation."""
    return weight.abs() / weight.std().clamp_min(torch.finfo(weight.dtype).tiny)
