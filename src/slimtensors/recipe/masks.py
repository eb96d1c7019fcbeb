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
    """Steps between two updates; the last update is always at `end`."""
    power: int = 3
    """Exponent of the curve: 1 is linear, 3 grows fast at first (Zhu and Gupta, 2017)."""

    def __post_init__(self) -> None:
        if not 0 <= self.start <= self.end:
            raise ConfigError(f"invalid schedule from step {self.start} to step {self.end}")
        if not 0 <= self.initial <= self.final < 1:
            raise ConfigError(
                f"sparsity must grow, from at least 0 to below 1; got {self.initial} to"
                f" {self.final}"
            )
        if self.every < 1:
            raise ConfigError(f"every must be a positive number of steps, got {self.every}")

    def at(self, step: int) -> float:
        """Return the share of zeros after a number of steps."""
        if step < self.start:
            return 0.0
        if step >= self.end:
            return self.final
        remaining = (self.end - step) / (self.end - self.start)
        return self.final + (self.initial - self.final) * remaining**self.power

    def is_due(self, step: int) -> bool:
        """Return True if masks change after this step."""
        if step == self.end:
            return True
        return self.start <= step < self.end and (step - self.start) % self.every == 0


class HeldMasks:
    """Weights with masks of the items to keep; all other items are held at zero.

    These masks are constant; subclasses update them during training.

    Example:
        >>> with HeldMasks({"weight": net.weight}, {"weight": mask}).during(optimizer):
        ...     train(net, optimizer)
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], masks: Mapping[str, Tensor]) -> None:
        self.weights = dict(weights)
        self.masks = {
            name: masks[name].to(weight.device, torch.bool) for name, weight in weights.items()
        }
        for name, weight in self.weights.items():
            if self.masks[name].shape != weight.shape:
                shapes = f"{list(self.masks[name].shape)}, expected {list(weight.shape)}"
                raise MismatchError(f"{name}: the mask has shape {shapes}")
        self.apply()

    @contextmanager
    def during(self, optimizer: Optimizer) -> Iterator[Self]:
        """Apply the masks at every step of an optimizer, within the context.

        Gradients are masked before they are accumulated, so that pruned weights contribute neither
        to gradient norms nor to momentum. After a step, weights and optimizer state are masked too.
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
        """Set masked weights, and their optimizer state, to zero."""
        for name, weight in self.weights.items():
            pruned = ~self.masks[name]
            weight.masked_fill_(pruned, 0)  # a product would keep -0.0 and NaN
            state = optimizer.state.get(weight, {}) if optimizer is not None else {}
            for x in state.values():
                if isinstance(x, Tensor) and x.shape == weight.shape:
                    x.masked_fill_(pruned, 0)

    def check(self) -> None:
        """Raise if a masked weight is not zero."""
        for name, weight in self.weights.items():
            nonzero = int(weight.detach()[~self.masks[name]].count_nonzero())
            if nonzero:
                raise MismatchError(f"{name}: {nonzero} pruned weights are not zero")

    def learn(self, name: str, gradient: Tensor) -> None:
        """Process a gradient before it is masked; a no-op for constant masks."""

    def advance(self) -> bool:
        """Advance by one optimizer step; return True if masks have changed."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming."""
        return {"masks": dict(self.masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        _copy_state(self.masks, state["masks"], "masks")

    def _mask_gradient(self, name: str, gradient: Tensor) -> Tensor:
        self.learn(name, gradient)
        return gradient.masked_fill(~self.masks[name], 0)

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        self.apply(optimizer)
        if self.advance():
            self.apply(optimizer)


Ranking = Callable[[Mapping[str, Tensor], float], Mapping[str, Tensor]]
"""Returns masks of the weights to keep, from their scores and the share of zeros."""


class GradualMasks(HeldMasks):
    """Masks that keep the largest weights, fewer of them over time by a schedule."""

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
        self._update_masks()
        self.apply()

    def advance(self) -> bool:
        """Count a step, and update the masks if due."""
        self.step += 1
        return self._update_masks()

    def scores(self) -> dict[str, Tensor]:
        """Return the importance of each weight."""
        return {name: weight.detach().abs() for name, weight in self.weights.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming."""
        return {**super().state_dict(), "step": self.step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.step = state["step"]

    def change(self, masks: Mapping[str, Tensor]) -> None:
        """Replace the masks without applying them."""
        self.masks.update(masks)

    @torch.no_grad()
    def _update_masks(self) -> bool:
        if not self.schedule.is_due(self.step):
            return False
        scores = {name: x.float() for name, x in self.scores().items()}
        # Weights that were pruned before training rank below all others and stay pruned.
        lowest = min(x.min() for x in scores.values()) - 1
        ranked = {name: x.where(self._allowed[name], lowest) for name, x in scores.items()}
        masks = self._ranking(ranked, self.schedule.at(self.step))
        self.change({name: mask & self._allowed[name] for name, mask in masks.items()})
        return True


class MovementMasks(GradualMasks):
    """Masks that follow learned scores until the schedule ends, and are constant afterwards.

    Scores are initialized by `first` from the weights, and learned at their own `rate`. The
    value of a pruned weight is kept, and restored when the weight is no longer pruned.
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
        """Accumulate the gradient of the scores: lower where weights move towards zero."""
        if self.step >= self.schedule.end:
            return
        weight = self.weights[name].detach() + self._aside[name]  # one of both is always zero
        slope = gradient.float() * weight.float()
        score = self._scores[name]
        score.grad = slope if score.grad is None else score.grad.add_(slope)

    def advance(self) -> bool:
        """Update the scores, count a step, and update the masks if due."""
        self._learner.step()
        self._learner.zero_grad()
        return super().advance()

    def scores(self) -> dict[str, Tensor]:
        """Return the importance of each weight."""
        return dict(self._scores)

    @torch.no_grad()
    def change(self, masks: Mapping[str, Tensor]) -> None:
        """Replace the masks, keep the values of newly pruned weights, and restore unpruned ones."""
        for name, mask in masks.items():
            dense = self.weights[name].detach() + self._aside[name]
            self.weights[name].copy_(dense.masked_fill(~mask, 0))
            self._aside[name].copy_(dense.masked_fill_(mask, 0))
        super().change(masks)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming."""
        scores = {name: x.detach() for name, x in self._scores.items()}
        learner = self._learner.state_dict()
        state = {"scores": scores, "aside": dict(self._aside), "learner": learner}
        return {**super().state_dict(), **state}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        _copy_state(self._scores, state["scores"], "scores")
        _copy_state(self._aside, state["aside"], "aside")
        self._learner.load_state_dict(deepcopy(state["learner"]))  # the optimizer keeps references


def rank_per_layer(structure: Structure, views: Mapping[str, Weight]) -> Ranking:
    """Return a ranking that gives every layer the same share of zeros, in some structure.

    `views` define how each weight is viewed as a matrix.
    """

    def rank(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        return {name: ~_find_zeros(structure, views[name], x, share) for name, x in scores.items()}

    return rank


def rank_globally(structure: Structure) -> Ranking:
    """Return a ranking that compares the weights of all layers with each other."""
    if not isinstance(structure, Unstructured):
        raise ConfigError(f"mask_structure {structure.name} cannot be applied globally")

    def rank(scores: Mapping[str, Tensor], share: float) -> dict[str, Tensor]:
        all_scores = torch.cat([x.flatten() for x in scores.values()])
        mask = ~structure.zeros(all_scores[None], share)[0]
        parts = torch.split(mask, [x.numel() for x in scores.values()])
        return {name: part.view_as(scores[name]) for name, part in zip(scores, parts, strict=True)}

    return rank


def relative_magnitude(weight: Tensor) -> Tensor:
    """Return initial scores: magnitudes in units of the standard deviation."""
    return weight.abs() / weight.std().clamp_min(torch.finfo(weight.dtype).tiny)


def _find_zeros(structure: Structure, view: Weight, scores: Tensor, share: float) -> Tensor:
    matrix = view.to_matrix(scores)
    experts = matrix if matrix.dim() == 3 else matrix[None]
    zeros = torch.stack([_find_matrix_zeros(structure, x, share) for x in experts])
    return view.from_matrix(zeros.view_as(matrix), scores.shape)


def _find_matrix_zeros(structure: Structure, scores: Tensor, share: float) -> Tensor:
    zeros = structure.zeros(scores, share)
    if structure.share is not None and share < structure.share:
        # Below the share of 2:4, prune only the lowest scores that 2:4 would prune.
        zeros = Unstructured().zeros(scores.masked_fill(~zeros, torch.inf), share)
    return zeros


def _copy_state(target: Mapping[str, Tensor], source: Mapping[str, Tensor], part: str) -> None:
    """Copy the tensors of a state; raise if names or shapes differ."""
    if target.keys() != source.keys():
        name = min(target.keys() ^ source.keys())
        where = "the checkpoint" if name in source else "this run"
        raise MismatchError(f"{part}: {name} is pruned in {where} only")
    for name, x in target.items():
        if x.shape != source[name].shape:
            shapes = f"{list(source[name].shape)} in the checkpoint, expected {list(x.shape)}"
            raise MismatchError(f"{part}: {name} has shape {shapes}")
        x.copy_(source[name])
