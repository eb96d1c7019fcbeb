"""Storage policy: roles of tensors, filters, and precision profiles."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from slimtensors._moved import Renamed
from slimtensors.checkpoint.names import strip_wrappers
from slimtensors.errors import ConfigError, suggest
from slimtensors.tensor import Spec

WEIGHTS, BUFFERS, OTHER = "weights", "buffers", "other"
FIRST, SECOND = "exp_avg", "exp_avg_sq"
"""Adam's names of the first and second moments."""

_MAX_BITS = 23
"""Mantissa bits of `float32`."""

_MODEL = re.compile(r"(?:model|state_dict)\.(?P<name>.+)")
_OPTIMIZER = re.compile(r"(?P<owner>.*\bstate\.(?P<index>\d+))\.(?P<key>[^.]+)")


@dataclass(frozen=True)
class StateTensorInfo:
    """Name, shape and roles of one tensor of a training state."""

    name: str
    """Path in the state, as in `optimizer.state.3.exp_avg`."""
    spec: Spec
    roles: frozenset[str]
    """`weights`, `buffers`, `embeddings`, `norms`, or the optimizer's key of a state."""
    parameter: str
    """The parameter that the tensor is or belongs to; empty if unknown."""
    owner: str = ""
    """Common prefix of the states of one parameter, as in `optimizer.state.3`."""
    suffix: str = ""
    """End of the name if this is a piece of a tensor."""

    place = Renamed("suffix")

    @property
    def is_matrix(self) -> bool:
        """Whether this is a float tensor of at least two dimensions; others are never rounded."""
        return len(self.spec.shape) > 1 and self.spec.dtype.is_floating_point

    def sibling(self, key: str) -> str:
        """Return the name of another state of the same parameter."""
        return f"{self.owner}.{key}{self.suffix}"


Predicate = Callable[[StateTensorInfo], bool]


@dataclass(frozen=True)
class Filter:
    """Select the tensors that fulfill all conditions; without conditions, all tensors.

    One-dimensional tensors, integers and random states are never selected: they stay exact.

    Example:
        >>> attention = Filter(names=("model.*.attn.*",), roles=("weights",))
    """

    names: tuple[str, ...] = ()
    """Globs of tensor names: `model.*.mlp.*`."""
    modules: tuple[str, ...] = ()
    """Submodules, `encoder.layer.0`: selects their weights and optimizer states."""
    roles: tuple[str, ...] = ()
    """`weights`, `exp_avg`, `exp_avg_sq`, `buffers`, `embeddings`, `norms`."""
    skip: tuple[str, ...] = ()
    """Globs of tensor names to exclude."""
    where: Predicate | None = None
    """Function that returns True for the tensors to select."""

    def __call__(self, info: StateTensorInfo) -> bool:
        """Return True if the tensor is selected."""
        return (
            info.is_matrix
            and (not self.names or _matches(info.name, self.names))
            and (not self.modules or any(_is_inside(info.parameter, path) for path in self.modules))
            and (not self.roles or not info.roles.isdisjoint(self.roles))
            and not _matches(info.name, self.skip)
            and (self.where is None or self.where(info))
        )


WEIGHT_MATRICES = Filter(roles=(WEIGHTS,))


@dataclass(frozen=True)
class Profile:
    """Precision of the tensors of a checkpoint. Vectors, counters and random states stay exact.

    Tensors from which training resumes are rounded stochastically, so that errors are unbiased and
    do not accumulate: rounded to nearest, a weight that moves by less than half a step would never
    move. The random numbers are seeded, so that the same state gives the same bytes.
    """

    name: str
    weight_step: float | None = None
    """Step size of weight updates, relative to the RMS of the update since the base."""
    first_step: float | None = None
    """Step size of first moments, relative to the square root of the second moment."""
    first_bits: int | None = None
    """Mantissa bits of first moments."""
    second_bits: int | None = None
    """Mantissa bits of second moments."""
    weight_bits: int | None = None
    """Mantissa bits of weights."""
    is_model_only: bool = False
    """Whether the optimizer and the rest are left out; training cannot resume from that."""

    def __post_init__(self) -> None:
        for key in ("first_bits", "second_bits", "weight_bits"):
            bits = getattr(self, key)
            if bits is not None and not (type(bits) is int and 1 <= bits <= _MAX_BITS):
                raise ConfigError(
                    f"profile {self.name!r}: {key} must be 1 to {_MAX_BITS}, got {bits!r}"
                )
        for key in ("weight_step", "first_step"):
            step = getattr(self, key)
            if step is not None and not 0 < step < math.inf:
                raise ConfigError(f"profile {self.name!r}: {key} must be positive, got {step!r}")

    @property
    def is_exact(self) -> bool:
        """Whether the whole state is stored bit for bit."""
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
    """Return the profile of this name; raise `ConfigError` if it is unknown."""
    if isinstance(profile, Profile):
        return profile
    if profile not in PROFILES:
        raise ConfigError(f"unknown profile {profile!r}; {suggest(profile, PROFILES)}")
    return PROFILES[profile]


def describe_tensors(
    tensors: Mapping[str, Tensor], state: Mapping[str, Any]
) -> dict[str, StateTensorInfo]:
    """Return the role of each tensor of a flattened state.

    A state of `build_checkpoint` has a layout, which lists its models and optimizers: tensors
    of `extra` have the role `other`. In other states, names decide.
    """
    layout = state.get("layout")
    if not isinstance(layout, dict):
        return {name: _describe_by_name(name, Spec.of(x), ()) for name, x in tensors.items()}
    parts = _find_parts(state, layout)
    found = {}
    for name, x in tensors.items():
        section, _, rest = name.partition(".")
        part = parts.get(section)
        if part is None and section in ("models", "optimizers"):
            key, _, rest = rest.partition(".")
            part = parts.get(f"{section}.{key}")
        found[name] = _describe_by_part(name, Spec.of(x), part, rest)
    return found


@dataclass(frozen=True)
class _StatePart:
    """A model or optimizer of a state."""

    prefix: str
    """Before the names of its parameters: `NAME.` for named models."""
    layout: Mapping[str, Any]
    names: Mapping[str, str] | None
    """Names in the state -> names without wrappers; None for an optimizer."""


def _find_parts(state: Mapping[str, Any], layout: Mapping[str, Any]) -> dict[str, _StatePart]:
    """Return the models and optimizers of a state by path."""

    def strip(model: object) -> dict[str, str]:
        names = model if isinstance(model, Mapping) else ()
        return strip_wrappers(name for name in names if isinstance(name, str))

    found = {
        "model": _StatePart("", layout, strip(state.get("model"))),
        "optimizer": _StatePart("", layout, None),
    }
    models = state.get("models")
    for name, part in layout.get("models", {}).items():
        names = strip(models.get(name) if isinstance(models, Mapping) else None)
        found[f"models.{name}"] = _StatePart(f"{name}.", part, names)
    for name, part in layout.get("optimizers", {}).items():
        found[f"optimizers.{name}"] = _StatePart("", part, None)
    return found


def _describe_by_part(name: str, spec: Spec, part: _StatePart | None, rest: str) -> StateTensorInfo:
    """Return the role of a tensor; `rest` is its name in the state of the part."""
    if part is None:
        return StateTensorInfo(name, spec, frozenset([OTHER]), "")
    if part.names is None:
        # The layout lists the parameters of the optimizer itself, not of one that it wraps.
        is_own = rest.startswith("state.")
        return _describe_by_name(name, spec, part.layout.get("optimizer", ()) if is_own else ())
    roles = {kind for kind in ("embeddings", "norms") if rest in part.layout.get(kind, ())}
    roles.add(BUFFERS if rest in part.layout.get(BUFFERS, ()) else WEIGHTS)
    parameter = f"{part.prefix}{part.names.get(rest, rest)}"
    return StateTensorInfo(name, spec, frozenset(roles), parameter)


def _describe_by_name(name: str, spec: Spec, order: Sequence[str]) -> StateTensorInfo:
    if found := _MODEL.fullmatch(name):
        return StateTensorInfo(name, spec, frozenset([WEIGHTS]), found["name"])
    if found := _OPTIMIZER.fullmatch(name):
        index = int(found["index"])
        parameter = order[index] if index < len(order) else ""
        return StateTensorInfo(name, spec, frozenset([found["key"]]), parameter, found["owner"])
    return StateTensorInfo(name, spec, frozenset([OTHER]), "")


def select_tensors(lossy: Filter, infos: Mapping[str, StateTensorInfo]) -> set[str]:
    """Return the names of the selected tensors; raise if a condition matches no tensor."""
    names = [info.name for info in infos.values()]
    for glob in (*lossy.names, *lossy.skip):
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(f"no tensor name matches {glob!r}; {suggest(glob, names[:500])}")
    for path in lossy.modules:
        if not any(_is_inside(info.parameter, path) for info in infos.values()):
            raise ConfigError(f"no module {path!r} in the checkpoint")
    roles = {role for info in infos.values() for role in info.roles}
    for role in lossy.roles:
        if role not in roles:
            raise ConfigError(f"no tensor has the role {role!r}; {suggest(role, roles)}")
    return {info.name for info in infos.values() if lossy(info)}


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _is_inside(parameter: str, path: str) -> bool:
    return parameter == path or parameter.startswith(f"{path}.")
