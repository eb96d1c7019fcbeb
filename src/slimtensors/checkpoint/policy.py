"""Storage policy: roles of tensors, filters, and profiles of precision."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from slimtensors.errors import ConfigError, nearest
from slimtensors.tensor import Spec

WEIGHTS, BUFFERS, OTHER = "weights", "buffers", "other"
FIRST, SECOND = "exp_avg", "exp_avg_sq"

_MODEL = re.compile(r"(?:model|state_dict)\.(?P<name>.+)")
_OPTIMIZER = re.compile(r"(?P<owner>.*\bstate\.(?P<index>\d+))\.(?P<key>[^.]+)")


@dataclass(frozen=True)
class RoleInfo:
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


def describe_roles(tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> dict[str, RoleInfo]:
    """Say what each tensor of a flattened state is."""
    layout = state.get("layout")
    kinds: Mapping[str, Any] = layout if isinstance(layout, dict) else {}
    return {name: _about(name, Spec.of(x), kinds) for name, x in tensors.items()}


def _about(name: str, spec: Spec, layout: Mapping[str, Any]) -> RoleInfo:
    if found := _MODEL.fullmatch(name):
        parameter = found["name"]
        roles = {kind for kind in ("embeddings", "norms") if parameter in layout.get(kind, ())}
        roles.add(BUFFERS if parameter in layout.get(BUFFERS, ()) else WEIGHTS)
        return RoleInfo(name, spec, frozenset(roles), parameter)
    if found := _OPTIMIZER.fullmatch(name):
        order, index = layout.get("optimizer", ()), int(found["index"])
        parameter = order[index] if index < len(order) else ""
        return RoleInfo(name, spec, frozenset([found["key"]]), parameter, found["owner"])
    return RoleInfo(name, spec, frozenset([OTHER]), "")


Predicate = Callable[[RoleInfo], bool]


@dataclass(frozen=True)
class Filter:
    """Choose tensors of which every given condition holds; without any, all.

    One-dimensional tensors, integers and random states are never chosen: they are always exact.
    """

    names: tuple[str, ...] = ()
    """Globs over the names of tensors: `model.*.mlp.*`."""
    modules: tuple[str, ...] = ()
    """Parts of the model, `encoder.layer.0`: their weights, and what the optimizer has for them."""
    roles: tuple[str, ...] = ()
    """`weights`, `exp_avg`, `exp_avg_sq`, `buffers`, `embeddings`, `norms`."""
    skip: tuple[str, ...] = ()
    """Globs over the names of tensors that are not to be chosen."""
    where: Predicate | None = None
    """Gets what is known of a tensor, and decides."""

    def __call__(self, about: RoleInfo) -> bool:
        """Tell whether a tensor is chosen."""
        return (
            about.is_matrix
            and (not self.names or _matches(about.name, self.names))
            and (not self.modules or any(_is_in(about.parameter, path) for path in self.modules))
            and (not self.roles or not about.roles.isdisjoint(self.roles))
            and not _matches(about.name, self.skip)
            and (self.where is None or self.where(about))
        )


WEIGHT_MATRICES = Filter(roles=(WEIGHTS,))


def select_tensors(lossy: Filter, abouts: Mapping[str, RoleInfo]) -> set[str]:
    """Return the names of the chosen tensors; raise if a condition can never hold."""
    everything = list(abouts.values())
    names = [about.name for about in everything]
    for glob in (*lossy.names, *lossy.skip):
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(f"no tensor is called {glob!r}; {nearest(glob, names[:500])}")
    for path in lossy.modules:
        if not any(_is_in(about.parameter, path) for about in everything):
            raise ConfigError(f"the checkpoint knows no module {path!r}")
    known = {role for about in everything for role in about.roles}
    for role in lossy.roles:
        if role not in known:
            raise ConfigError(f"no tensor has the role {role!r}; {nearest(role, known)}")
    return {about.name for about in everything if lossy(about)}


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _is_in(parameter: str, path: str) -> bool:
    return parameter == path or parameter.startswith(f"{path}.")


@dataclass(frozen=True)
class Profile:
    """What may be rounded. Vectors, counters and random states never are.

    What a training goes on from is rounded at random, so that errors have no direction and do not
    add up: rounded to nearest, a weight that moves by less than half a step would never move. The
    random numbers have a seed, so that the same state gives the same bytes.
    """

    name: str
    weight_step: float | None = None
    """Weights move from the base in steps of this, times the RMS of how far they moved."""
    first_step: float | None = None
    """First moments are multiples of this, times the root of the second."""
    first_bits: int | None = None
    """Bits of the mantissa of first moments."""
    second_bits: int | None = None
    """Bits of the mantissa of second moments."""
    weight_bits: int | None = None
    """Bits of the mantissa of weights."""
    is_model_only: bool = False
    """Whether the optimizer and the rest are left out: good to look at, not to resume from."""

    @property
    def is_exact(self) -> bool:
        """Whether everything comes back bit for bit."""
        steps = (self.weight_step, self.first_step)
        return steps == (None, None) and not any(
            (self.first_bits, self.second_bits, self.weight_bits, self.is_model_only)
        )


PROFILES: Mapping[str, Profile] = {
    profile.name: profile
    for profile in (
        Profile("exact"),
        Profile("optimizer-bf16", first_bits=7, second_bits=7),
        Profile("optimizer", first_step=1 / 16, second_bits=5),
        Profile("all", weight_step=0.4, first_step=1 / 8, second_bits=3),
        Profile("history", weight_bits=7, is_model_only=True),
    )
}


def find_profile(profile: str | Profile) -> Profile:
    """Return the profile of this name."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ConfigError(f"unknown profile {profile!r}; {nearest(profile, PROFILES)}")
    return PROFILES[profile]
