"""What to store of each tensor of a state: itself, how it differs from a base, or less of it."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from slimtensors import presets
from slimtensors.archive.state import Item, State, given
from slimtensors.checkpoint.entries import (
    GROUPED,
    ROOTS,
    SAME,
    STEPS,
    WHOLE,
    Entry,
    decoded,
)
from slimtensors.checkpoint.precision import in_steps, seed_of, with_bits
from slimtensors.checkpoint.profiles import Profile
from slimtensors.checkpoint.roles import FIRST, SECOND, WEIGHTS, About
from slimtensors.delta import cost, digest
from slimtensors.distance import norm, relative_distance
from slimtensors.residual import grouped, kinds, smallest
from slimtensors.spec import Each, Json, Spec, on_cpu, same_bits, serially

_BITS = 7
"""Bits of the mantissa of what cannot be told in steps."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


class BaseTensors(Protocol):
    """The tensors of a checkpoint that others may be told from."""

    def __contains__(self, name: object) -> bool: ...

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        ...

    def load(self, name: str, each: Each) -> Tensor:
        """Read and decode a tensor."""
        ...


@dataclass(frozen=True)
class Coding:
    """How the tensors of a state are to be stored."""

    tensors: Mapping[str, Tensor]
    abouts: Mapping[str, About]
    step: object
    """A seed of random numbers; other ones at other steps."""
    decay: Callable[[About], float]
    """Returns what a second moment has been multiplied by since the base was saved."""
    profile: Profile
    allowed: Collection[str]
    """Names of the tensors that the profile may touch."""
    base: BaseTensors | None
    errors: dict[str, float] = field(default_factory=dict)
    """Relative RMS error of each tensor that was rounded; filled as they are written."""
    kept_exact: dict[str, str] = field(default_factory=dict)
    """Tensors that the profile would round and that are not, and why."""

    def state(self, tree: Json | None) -> State:
        """Return what to write."""
        plain = given(self.tensors, tree)
        entries: dict[str, Json] = {}

        def item(name: str) -> Item:
            spec = Spec.of(self.tensors[name])
            entries[name] = {}  # in this order, whichever thread is first

            def read(each: Each) -> Tensor | None:
                entry, r = self._stored(name, each)
                entries[name] = entry.to_json()
                return r

            return Item(name, spec, read, always_blob=True)

        return State(
            [item(item_.name) for item_ in plain.items],
            tree=tree,
            delta={"checkpoint": entries, "tied": dict(plain.tied)},
        )

    def _stored(self, name: str, each: Each) -> tuple[Entry, Tensor | None]:
        x, about = on_cpu(self.tensors[name]).contiguous(), self.abouts[name]
        y = self._base_tensor(name, Spec.of(x), each)
        if y is not None and same_bits(x, y):
            return Entry(SAME, Spec.of(x), base=digest(y)), None
        if not self._may_round(about, x):
            return self._exact(about, x, y, each)
        entry, r, other = self._rounded(about, x, y, each)
        if error := relative_distance(decoded(entry, r, other, each), x):
            self.errors[name] = error
        return entry, r

    def _is_touched(self, about: About) -> bool:
        """Tell whether the profile would round such a tensor."""
        profile = self.profile
        steps = (
            (WEIGHTS, profile.weight_step or profile.weight_bits),
            (FIRST, profile.first_step or profile.first_bits),
            (SECOND, profile.second_bits),
        )
        is_named = any(how and role in about.roles for role, how in steps)
        return is_named and about.is_matrix and about.name in self.allowed

    def _may_round(self, about: About, x: Tensor) -> bool:
        if not self._is_touched(about) or not x.numel():
            return False
        if x.dtype not in _FLOATS:
            self.kept_exact[about.name] = f"{x.dtype} is kept exact"
            return False
        if not torch.isfinite(x.abs().amax()):
            self.kept_exact[about.name] = "holds NaN or infinity and is kept exact"
            return False
        return True

    def _exact(self, about: About, x: Tensor, y: Tensor | None, each: Each) -> tuple[Entry, Tensor]:
        """Store all bits: as a difference, or in the order of the second moment, or as it is."""
        if FIRST in about.roles:
            return self._by_second(about, x, Entry(WHOLE, Spec.of(x)))
        times = self.decay(about) if y is not None and SECOND in about.roles else 1.0
        return self._difference(about.name, x, y, Entry(WHOLE, Spec.of(x), times=times), each)

    def _difference(
        self, name: str, x: Tensor, y: Tensor | None, entry: Entry, each: Each
    ) -> tuple[Entry, Tensor]:
        """Store `x`, which has the dtype that `entry` says, in the smallest way there is."""
        if y is None or not any(kinds(Spec.of(x))):
            return replace(entry, times=1.0), x
        kind, r = smallest(x, entry.predicted(y), _cost(name), each=each)
        if kind == "whole":
            return replace(entry, times=1.0), x
        return replace(entry, kind=kind, base=digest(y)), r

    def _by_second(self, about: About, x: Tensor, entry: Entry) -> tuple[Entry, Tensor]:
        """Store a first moment so that those lie together whose second moments are alike."""
        second = self._second(about)
        if second is None or x.dtype not in _FLOATS:
            return entry, x
        r = grouped(x, second.to(x.dtype).contiguous())
        if _cost(about.name)(r) >= _cost(about.name)(x):
            return entry, x
        return replace(entry, kind=GROUPED, by=about.sibling(SECOND)), r

    def _rounded(
        self, about: About, x: Tensor, y: Tensor | None, each: Each
    ) -> tuple[Entry, Tensor, Tensor | None]:
        """Store less of a tensor; also return what a reader decodes it by."""
        profile, spec = self.profile, Spec.of(x)
        if FIRST in about.roles:
            return self._rounded_first(about, x)
        if WEIGHTS in about.roles and profile.weight_step:
            if y is None:
                entry, r = self._exact(about, x, y, each)
                return entry, r, y
            moved = x.float() - y.float()
            step = profile.weight_step * norm(moved) / moved.numel() ** 0.5
            q = in_steps(moved, step, self._seed(about))
            if q is not None:
                return Entry(STEPS, spec, base=digest(y), step=step), q, y
        is_second = SECOND in about.roles
        bits = (profile.second_bits if is_second else profile.weight_bits) or _BITS
        seed = self._seed(about) if is_second else None
        short = with_bits(x, bits, seed)
        times = self.decay(about) if is_second and y is not None else 1.0
        entry = Entry(WHOLE, spec, bits=bits, seed=seed, times=times)
        entry, r = self._difference(about.name, short, y, entry, each)
        return entry, r, y

    def _rounded_first(self, about: About, x: Tensor) -> tuple[Entry, Tensor, Tensor | None]:
        second = self._second(about)
        if self.profile.first_step and second is not None:
            unit = second.float().sqrt() * self.profile.first_step
            # Where there is no second moment there is no first one; 0/0 would say otherwise.
            q = in_steps(x.float(), torch.where(unit > 0, unit, torch.inf), self._seed(about))
            if q is not None and not x[unit == 0].any():
                by = about.sibling(SECOND)
                return Entry(ROOTS, Spec.of(x), by=by, step=self.profile.first_step), q, second
        bits = self.profile.first_bits or _BITS
        short = with_bits(x, bits, self._seed(about))
        entry, r = self._by_second(about, short, Entry(WHOLE, Spec.of(x), bits=bits))
        return entry, r, second

    def _second(self, about: About) -> Tensor | None:
        """Return the second moment of the same parameter, as a reader will see it."""
        name = about.sibling(SECOND)
        if name not in self.tensors or self.tensors[name].shape != about.spec.shape:
            return None
        x, sibling = on_cpu(self.tensors[name]).contiguous(), self.abouts[name]
        if x.dtype != about.spec.dtype:
            return None
        if not self._is_touched(sibling):
            return x
        y = self._base_tensor(name, Spec.of(x), serially)
        if (y is not None and same_bits(x, y)) or not self._may_round(sibling, x):
            return x
        return with_bits(x, self.profile.second_bits or _BITS, self._seed(sibling)).to(x.dtype)

    def _seed(self, about: About) -> int:
        return seed_of(about.name, self.step)

    def _base_tensor(self, name: str, spec: Spec, each: Each) -> Tensor | None:
        if self.base is None or name not in self.base or self.base.spec(name) != spec:
            return None
        return self.base.load(name, each)


def _cost(name: str) -> Callable[[Tensor], float]:
    return lambda x: cost(name, x, presets.lossless)
