"""How one tensor of a checkpoint is stored: what a reader has to do to get it back."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from slimtensors.checkpoint.precision import MANTISSA, multiples, short_dtype, with_bits
from slimtensors.errors import CorruptFileError
from slimtensors.memory import empty
from slimtensors.residual import Kind, undo, ungrouped
from slimtensors.spec import Each, Json, Spec

WHOLE, SAME = "whole", "same"
DIFFERENCES = ("difference", "by-exponent")
GROUPED, STEPS, ROOTS = "grouped", "steps", "roots"

_PIECE = 1 << 15

NEEDS_BASE = {SAME, *DIFFERENCES, STEPS}
NEEDS_SIBLING = {GROUPED, ROOTS}


@dataclass(frozen=True)
class Entry:
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
    def from_json(cls, data: Mapping[str, Any]) -> "Entry":
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
        return x if self.bits is None else with_bits(x, self.bits, self.seed)


def _multiplied(x: Tensor, times: float) -> Tensor:
    """Multiply in pieces so small that torch wakes no threads of its own beside those we have."""
    out = empty(Spec.of(x))
    items, to = x.view(-1), out.view(-1)
    for i in range(0, items.numel(), _PIECE):
        torch.mul(items[i : i + _PIECE], times, out=to[i : i + _PIECE])
    return out


def decoded(entry: Entry, r: Tensor | None, other: Tensor | None, each: Each) -> Tensor:
    """Return the tensor: `r` is what is stored, `other` the base's tensor or the sibling."""
    x = _decoded(entry, r, other, each)
    if tuple(x.shape) != entry.like.shape:
        raise CorruptFileError(f"{tuple(x.shape)} is stored, but {entry.like.shape} was expected")
    return x.to(entry.like.dtype)


def _decoded(entry: Entry, r: Tensor | None, other: Tensor | None, each: Each) -> Tensor:
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
        return undo(cast(Kind, entry.kind), r, entry.predicted(other), each=each)
    if entry.kind == GROUPED:
        return ungrouped(r, other.to(entry.dtype)).view(entry.like.shape)
    assert entry.step is not None
    if r.shape != other.shape:
        raise CorruptFileError(f"{tuple(r.shape)} items do not fit {tuple(other.shape)}")
    if entry.kind == STEPS:
        return other.float() + multiples(r, entry.step)
    return multiples(r, other.float().sqrt() * entry.step)


def _can_shorten(dtype: torch.dtype, bits: object) -> bool:
    return dtype in MANTISSA and type(bits) is int and 1 <= bits <= MANTISSA[dtype]


def _is_seed(seed: object) -> bool:
    return type(seed) is int and 0 <= seed < 1 << 31
