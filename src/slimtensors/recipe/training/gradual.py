"""Gradual magnitude pruning: the smallest weights go, a few at a time, and never come back."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.recipe.training.held import HeldMasks
from slimtensors.recipe.training.ranking import Ranking
from slimtensors.recipe.training.schedule import Schedule


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
