"""How each tensor of a checkpoint is stored: whole, as a difference, or rounded."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from slimtensors.archive.delta import estimate_bytes, tensor_digest
from slimtensors.archive.write import ArchiveSource, TensorSource, given
from slimtensors.checkpoint.policy import FIRST, SECOND, WEIGHTS, Profile, RoleInfo
from slimtensors.checkpoint.precision import (
    MANTISSA,
    round_mantissa,
    round_to_steps,
    seed_of,
    short_dtype,
    step_multiples,
)
from slimtensors.codecs import presets
from slimtensors.codecs.residual import (
    Kind,
    applicable_kinds,
    apply_residual,
    choose_residual,
    group_bytes,
    ungroup_bytes,
)
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    KERNEL_FLOATS,
    Json,
    Spec,
    allocate,
    bitwise_equal,
    norm,
    relative_distance,
    to_cpu,
)

WHOLE, SAME = "whole", "same"
DIFFERENCES = ("difference", "by-exponent")
GROUPED, STEPS, ROOTS = "grouped", "steps", "roots"

_PIECE = 1 << 15

NEEDS_BASE = {SAME, *DIFFERENCES, STEPS}
NEEDS_SIBLING = {GROUPED, ROOTS}


@dataclass(frozen=True)
class TensorEntry:
    """How a tensor is stored. `docs/format-checkpoints.md` says what each kind means."""

    kind: str
    like: Spec
    """The tensor that comes back."""
    bits: int | None = None
    """Bits of the mantissa that were kept, if not all were."""
    seed: int | None = None
    """Of the random numbers by which it was rounded, if it was so."""
    base: str | None = None
    """Digest of the base's tensor."""
    times: float = 1.0
    """What the base's tensor is multiplied by first."""
    by: str | None = None
    """The name of another tensor of the same checkpoint."""
    step: float | None = None

    def to_json(self) -> Json:
        """Return the JSON form, without what says nothing."""
        data: Json = {"as": self.kind, **self.like.to_json()}
        if self.times != 1.0:
            data["times"] = self.times
        for key in ("bits", "seed", "base", "by", "step"):
            if getattr(self, key) is not None:
                data[key] = getattr(self, key)
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "TensorEntry":
        """Parse the JSON form."""
        try:
            entry = cls(
                kind=data["as"],
                like=Spec.from_json(dict(data)),
                bits=data.get("bits"),
                seed=data.get("seed"),
                base=data.get("base"),
                times=float(data.get("times", 1.0)),
                by=data.get("by"),
                step=float(data["step"]) if "step" in data else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"not a stored tensor: {str(data)[:80]}") from error
        fine = (
            entry.kind in {WHOLE, *NEEDS_BASE, *NEEDS_SIBLING}
            and (entry.bits is None or _can_shorten(entry.like.dtype, entry.bits))
            and (entry.seed is None or _is_seed(entry.seed))
            and isinstance(entry.base, str) == (entry.kind in NEEDS_BASE)
            and isinstance(entry.by, str) == (entry.kind in NEEDS_SIBLING)
            and (entry.step is not None) == (entry.kind in (STEPS, ROOTS))
        )
        if not fine:
            raise CorruptFileError(f"not a stored tensor: {str(data)[:80]}")
        return entry

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the tensor is stored."""
        return short_dtype(self.like.dtype, self.bits)

    def predicted(self, base: Tensor) -> Tensor:
        """Return what the tensor would be if it had only been multiplied since its base.

        Rounded by the same random numbers: what did not change then does not differ.
        """
        x = base if self.times == 1.0 else _multiplied(base, self.times)
        return x if self.bits is None else round_mantissa(x, self.bits, self.seed)


def _multiplied(x: Tensor, times: float) -> Tensor:
    """Multiply in pieces so small that torch wakes no threads of its own beside those we have."""
    out = allocate(Spec.of(x))
    items, to = x.view(-1), out.view(-1)
    for i in range(0, items.numel(), _PIECE):
        torch.mul(items[i : i + _PIECE], times, out=to[i : i + _PIECE])
    return out


def decode_entry(entry: TensorEntry, r: Tensor | None, other: Tensor | None, each: Each) -> Tensor:
    """Return the tensor: `r` is what is stored, `other` the base's tensor or the sibling."""
    x = _decoded(entry, r, other, each)
    if tuple(x.shape) != entry.like.shape:
        raise CorruptFileError(f"{tuple(x.shape)} is stored, but {entry.like.shape} was expected")
    return x.to(entry.like.dtype)


def _decoded(entry: TensorEntry, r: Tensor | None, other: Tensor | None, each: Each) -> Tensor:
    if entry.kind == SAME:
        assert other is not None
        return other
    assert r is not None
    if entry.kind == WHOLE:
        if r.dtype != entry.dtype:
            raise CorruptFileError(f"{r.dtype} is stored, but {entry.dtype} was expected")
        return r
    assert other is not None
    if entry.kind in DIFFERENCES:
        return apply_residual(cast(Kind, entry.kind), r, entry.predicted(other), each=each)
    if entry.kind == GROUPED:
        return ungroup_bytes(r, other.to(entry.dtype)).view(entry.like.shape)
    assert entry.step is not None
    if r.shape != other.shape:
        raise CorruptFileError(f"{tuple(r.shape)} items do not fit {tuple(other.shape)}")
    if entry.kind == STEPS:
        return other.float() + step_multiples(r, entry.step)
    return step_multiples(r, other.float().sqrt() * entry.step)


def _can_shorten(dtype: torch.dtype, bits: object) -> bool:
    return dtype in MANTISSA and type(bits) is int and 1 <= bits <= MANTISSA[dtype]


def _is_seed(seed: object) -> bool:
    return type(seed) is int and 0 <= seed < 1 << 31


_BITS = 7
"""Bits of the mantissa of what cannot be told in steps."""


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
    abouts: Mapping[str, RoleInfo]
    step: object
    """A seed of random numbers; other ones at other steps."""
    decay: Callable[[RoleInfo], float]
    """Returns what a second moment has been multiplied by since the base was saved."""
    profile: Profile
    allowed: Collection[str]
    """Names of the tensors that the profile may touch."""
    base: BaseTensors | None
    errors: dict[str, float] = field(default_factory=dict)
    """Relative RMS error of each tensor that was rounded; filled as they are written."""
    kept_exact: dict[str, str] = field(default_factory=dict)
    """Tensors that the profile would round and that are not, and why."""

    def state(self, tree: Json | None) -> ArchiveSource:
        """Return what to write."""
        plain = given(self.tensors, tree)
        entries: dict[str, Json] = {}

        def item(name: str) -> TensorSource:
            spec = Spec.of(self.tensors[name])
            entries[name] = {}  # in this order, whichever thread is first

            def read(each: Each) -> Tensor | None:
                entry, r = self._stored(name, each)
                entries[name] = entry.to_json()
                return r

            return TensorSource(name, spec, read, always_blob=True)

        return ArchiveSource(
            [item(item_.name) for item_ in plain.items],
            tree=tree,
            delta={"checkpoint": entries, "tied": dict(plain.tied)},
        )

    def _stored(self, name: str, each: Each) -> tuple[TensorEntry, Tensor | None]:
        x, about = to_cpu(self.tensors[name]).contiguous(), self.abouts[name]
        y = self._base_tensor(name, Spec.of(x), each)
        if y is not None and bitwise_equal(x, y):
            return TensorEntry(SAME, Spec.of(x), base=tensor_digest(y)), None
        if not self._may_round(about, x):
            return self._exact(about, x, y, each)
        entry, r, other = self._rounded(about, x, y, each)
        if error := relative_distance(decode_entry(entry, r, other, each), x):
            self.errors[name] = error
        return entry, r

    def _is_touched(self, about: RoleInfo) -> bool:
        """Tell whether the profile would round such a tensor."""
        profile = self.profile
        steps = (
            (WEIGHTS, profile.weight_step or profile.weight_bits),
            (FIRST, profile.first_step or profile.first_bits),
            (SECOND, profile.second_bits),
        )
        is_named = any(how and role in about.roles for role, how in steps)
        return is_named and about.is_matrix and about.name in self.allowed

    def _may_round(self, about: RoleInfo, x: Tensor) -> bool:
        if not self._is_touched(about) or not x.numel():
            return False
        if x.dtype not in KERNEL_FLOATS:
            self.kept_exact[about.name] = f"{x.dtype} is kept exact"
            return False
        if not torch.isfinite(x.abs().amax()):
            self.kept_exact[about.name] = "holds NaN or infinity and is kept exact"
            return False
        return True

    def _exact(
        self, about: RoleInfo, x: Tensor, y: Tensor | None, each: Each
    ) -> tuple[TensorEntry, Tensor]:
        """Store all bits: as a difference, or in the order of the second moment, or as it is."""
        if FIRST in about.roles:
            return self._by_second(about, x, TensorEntry(WHOLE, Spec.of(x)))
        times = self.decay(about) if y is not None and SECOND in about.roles else 1.0
        return self._difference(about.name, x, y, TensorEntry(WHOLE, Spec.of(x), times=times), each)

    def _difference(
        self, name: str, x: Tensor, y: Tensor | None, entry: TensorEntry, each: Each
    ) -> tuple[TensorEntry, Tensor]:
        """Store `x`, which has the dtype that `entry` says, in the smallest way there is."""
        if y is None or not any(applicable_kinds(Spec.of(x))):
            return replace(entry, times=1.0), x
        kind, r = choose_residual(x, entry.predicted(y), _cost(name), each=each)
        if kind == "whole":
            return replace(entry, times=1.0), x
        return replace(entry, kind=kind, base=tensor_digest(y)), r

    def _by_second(
        self, about: RoleInfo, x: Tensor, entry: TensorEntry
    ) -> tuple[TensorEntry, Tensor]:
        """Store a first moment so that those lie together whose second moments are alike."""
        second = self._second(about)
        if second is None or x.dtype not in KERNEL_FLOATS:
            return entry, x
        r = group_bytes(x, second.to(x.dtype).contiguous())
        if _cost(about.name)(r) >= _cost(about.name)(x):
            return entry, x
        return replace(entry, kind=GROUPED, by=about.sibling(SECOND)), r

    def _rounded(
        self, about: RoleInfo, x: Tensor, y: Tensor | None, each: Each
    ) -> tuple[TensorEntry, Tensor, Tensor | None]:
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
            q = round_to_steps(moved, step, self._seed(about))
            if q is not None:
                return TensorEntry(STEPS, spec, base=tensor_digest(y), step=step), q, y
        is_second = SECOND in about.roles
        bits = (profile.second_bits if is_second else profile.weight_bits) or _BITS
        seed = self._seed(about) if is_second else None
        short = round_mantissa(x, bits, seed)
        times = self.decay(about) if is_second and y is not None else 1.0
        entry = TensorEntry(WHOLE, spec, bits=bits, seed=seed, times=times)
        entry, r = self._difference(about.name, short, y, entry, each)
        return entry, r, y

    def _rounded_first(
        self, about: RoleInfo, x: Tensor
    ) -> tuple[TensorEntry, Tensor, Tensor | None]:
        second = self._second(about)
        if self.profile.first_step and second is not None:
            unit = second.float().sqrt() * self.profile.first_step
            # Where there is no second moment there is no first one; 0/0 would say otherwise.
            q = round_to_steps(x.float(), torch.where(unit > 0, unit, torch.inf), self._seed(about))
            if q is not None and not x[unit == 0].any():
                by = about.sibling(SECOND)
                return (
                    TensorEntry(ROOTS, Spec.of(x), by=by, step=self.profile.first_step),
                    q,
                    second,
                )
        bits = self.profile.first_bits or _BITS
        short = round_mantissa(x, bits, self._seed(about))
        entry, r = self._by_second(about, short, TensorEntry(WHOLE, Spec.of(x), bits=bits))
        return entry, r, second

    def _second(self, about: RoleInfo) -> Tensor | None:
        """Return the second moment of the same parameter, as a reader will see it."""
        name = about.sibling(SECOND)
        if name not in self.tensors or self.tensors[name].shape != about.spec.shape:
            return None
        x, sibling = to_cpu(self.tensors[name]).contiguous(), self.abouts[name]
        if x.dtype != about.spec.dtype:
            return None
        if not self._is_touched(sibling):
            return x
        y = self._base_tensor(name, Spec.of(x), serially)
        if (y is not None and bitwise_equal(x, y)) or not self._may_round(sibling, x):
            return x
        return round_mantissa(x, self.profile.second_bits or _BITS, self._seed(sibling)).to(x.dtype)

    def _seed(self, about: RoleInfo) -> int:
        return seed_of(about.name, self.step)

    def _base_tensor(self, name: str, spec: Spec, each: Each) -> Tensor | None:
        if self.base is None or name not in self.base or self.base.spec(name) != spec:
            return None
        return self.base.load(name, each)


def _cost(name: str) -> Callable[[Tensor], float]:
    return lambda x: estimate_bytes(name, x, presets.lossless)


def decay_since(
    base: BaseTensors | None, tensors: Mapping[str, Tensor], whole: Mapping[str, Any]
) -> Callable[[RoleInfo], float]:
    """Return a function that tells by what a second moment was multiplied since the base."""

    def decay(about: RoleInfo) -> float:
        name = about.sibling("step")
        now = tensors.get(name)
        if base is None or name not in base or base.spec(name) != Spec(torch.float32, ()):
            return 1.0
        beta = _second_beta(whole, about.owner)
        if now is None or beta is None or now.dim():
            return 1.0
        return apply_decay(beta, float(base.load(name, serially)), float(now))

    return decay


def apply_decay(beta: float, then: float, now: float) -> float:
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
