"""How second moments fade: by a known factor at every step, which is the best guess of a change."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from slimtensors.checkpoint.coding import BaseTensors
from slimtensors.checkpoint.roles import About
from slimtensors.spec import Spec, serially


def decay_since(
    base: BaseTensors | None, tensors: Mapping[str, Tensor], whole: Mapping[str, Any]
) -> Callable[[About], float]:
    """Return a function that tells by what a second moment was multiplied since the base."""

    def decay(about: About) -> float:
        name = about.sibling("step")
        now = tensors.get(name)
        if base is None or name not in base or base.spec(name) != Spec(torch.float32, ()):
            return 1.0
        beta = _second_beta(whole, about.owner)
        if now is None or beta is None or now.dim():
            return 1.0
        return faded(beta, float(base.load(name, serially)), float(now))

    return decay


def faded(beta: float, then: float, now: float) -> float:
    """Return what is left of a moving average after some steps."""
    return float(beta ** max(0.0, now - then))


def _second_beta(whole: Mapping[str, Any], owner: str) -> float | None:
    """Find the beta2 of a parameter's group, `owner` being as in `optimizer.state.3`."""
    *path, _, index = owner.split(".")
    place: Any = whole
    for key in path:
        if isinstance(place, list) and key.isdigit() and int(key) < len(place):
            place = place[int(key)]
        else:
            place = place.get(key) if isinstance(place, dict) else None
    groups = place.get("param_groups") if isinstance(place, dict) else None
    for group in groups if isinstance(groups, list) else []:
        betas = group.get("betas")
        if int(index) in group["params"] and isinstance(betas, tuple | list):
            return float(betas[1])
    return None
