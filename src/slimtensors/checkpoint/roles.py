"""What each tensor of a training state is: a weight, a moment, a buffer, a counter."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimtensors.spec import Spec

WEIGHTS, BUFFERS, OTHER = "weights", "buffers", "other"
FIRST, SECOND = "exp_avg", "exp_avg_sq"

_MODEL = re.compile(r"(?:model|state_dict)\.(?P<name>.+)")
_OPTIMIZER = re.compile(r"(?P<owner>.*\bstate\.(?P<index>\d+))\.(?P<key>[^.]+)")


@dataclass(frozen=True)
class About:
    """What is known of a tensor of a training state."""

    name: str
    """Its path in the state, as in `optimizer.state.3.exp_avg`."""
    spec: Spec
    roles: frozenset[str]
    """`weights`, `buffers`, `embeddings`, `norms`; the optimizer's own word for its states."""
    parameter: str
    """The parameter that it is, or is a state of; empty if none is known."""
    owner: str = ""
    """What the states of one parameter have in common, as in `optimizer.state.3`."""
    place: str = ""
    """Of a piece of a tensor, how its name ends."""

    @property
    def is_matrix(self) -> bool:
        """Whether it is made of floats and has rows: all that may ever be lossy."""
        return len(self.spec.shape) > 1 and self.spec.dtype.is_floating_point

    def sibling(self, role: str) -> str:
        """Return the name of another state of the same parameter."""
        return f"{self.owner}.{role}{self.place}"


def describe(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, About]:
    """Say what each tensor of a flattened state is."""
    layout = state.get("layout")
    kinds: Mapping[str, Any] = layout if isinstance(layout, dict) else {}
    return {name: _about(name, Spec.of(x), kinds) for name, x in tensors.items()}


def _about(name: str, spec: Spec, layout: Mapping[str, Any]) -> About:
    if found := _MODEL.fullmatch(name):
        parameter = found["name"]
        roles = {kind for kind in ("embeddings", "norms") if parameter in layout.get(kind, ())}
        roles.add(BUFFERS if parameter in layout.get(BUFFERS, ()) else WEIGHTS)
        return About(name, spec, frozenset(roles), parameter)
    if found := _OPTIMIZER.fullmatch(name):
        order, index = layout.get("optimizer", ()), int(found["index"])
        parameter = order[index] if index < len(order) else ""
        return About(name, spec, frozenset([found["key"]]), parameter, found["owner"])
    return About(name, spec, frozenset([OTHER]), "")
