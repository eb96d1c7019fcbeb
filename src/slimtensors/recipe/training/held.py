"""Zeros that stay zeros while a model is trained, by whatever optimizer."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from slimtensors.errors import MismatchError


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
