"""Movement pruning: weights that training moves towards zero go, and may come back.

The method of Sanh, Wolf and Rush (2020), which made PruneBERT. A score is learned for every weight,
with the gradient that the weight would have if all were kept, times the weight itself; those with
the highest scores are kept.
"""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.recipe.training.gradual import GradualMasks
from slimtensors.recipe.training.held import fill
from slimtensors.recipe.training.ranking import Ranking
from slimtensors.recipe.training.schedule import Schedule


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
