"""How the pieces of a rank are stored: as they are, as differences from a base, or rounded."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from slimtensors.archive.state import State, given
from slimtensors.checkpoint.coding import Coding
from slimtensors.checkpoint.decay import faded
from slimtensors.checkpoint.filters import Filter
from slimtensors.checkpoint.io import FlatState
from slimtensors.checkpoint.profiles import Profile
from slimtensors.checkpoint.roles import OTHER, WEIGHTS, About
from slimtensors.distributed.boxes import Box
from slimtensors.distributed.manifest import Keys
from slimtensors.distributed.share import PREFIX, Piece, place
from slimtensors.distributed.stored import StoredShards
from slimtensors.spec import Each, Spec

_OPTIMIZER = re.compile(r"(?P<owner>(?:.*\.)?state\.(?P<parameter>.+))\.(?P<key>[^.]+)")
_STEP = re.compile(r"(?:.*\.)?state\..+\.step")


@dataclass(frozen=True)
class How:
    """How a checkpoint is to be stored."""

    profile: Profile
    lossy: Filter | None
    """Chooses what the profile may round; without one, all."""
    base: StoredShards | None

    @property
    def is_plain(self) -> bool:
        """Whether every piece is stored as it is."""
        return self.base is None and self.profile.is_exact


@dataclass(frozen=True)
class Coded:
    """What a rank writes, and what became of it."""

    state: State
    errors: Mapping[str, float]
    """Relative RMS error of each piece that is not exact; complete once all is written."""
    kept_exact: Mapping[str, str]
    """Pieces that were to be rounded and are not, and why."""


def coded(
    flat: FlatState, pieces: Mapping[str, Piece], how: How, whole: Mapping[str, Any]
) -> Coded:
    """Return what to write; `whole` is the state that all ranks save, flat."""
    if how.is_plain:
        return Coded(given(flat.tensors, flat.tree), {}, {})
    abouts = {
        name: About(name, Spec.of(x), frozenset([OTHER]), "") for name, x in flat.tensors.items()
    }
    allowed: set[str] = set()
    for name, piece in pieces.items():
        about = describe(piece.tensor, piece.spec, piece.path)
        if how.lossy is None or how.lossy(about):
            allowed.add(name)
        abouts[name] = replace(
            about,
            name=name,
            spec=Spec.of(piece.data),
            owner=f"{PREFIX}{about.owner}",
            place=place(piece.box),
        )
    base = _BasePieces(how.base, pieces) if how.base else None
    step = next((_number(x) for name, x in whole.items() if _STEP.fullmatch(name)), None)
    coding = Coding(
        flat.tensors,
        abouts,
        step=step,
        decay=_decay_since(how.base, whole),
        profile=how.profile,
        allowed=allowed,
        base=base,
    )
    return Coded(coding.state(flat.tree), coding.errors, coding.kept_exact)


def describe(name: str, spec: Spec, path: Keys | None) -> About:
    """Say what a tensor is, by the names that torch's `get_state_dict` gives."""
    if path is None or len(path) == 1 or path[0] in ("model", "state_dict"):
        parameter = name if path is None or len(path) == 1 else name.partition(".")[2]
        return About(name, spec, frozenset([WEIGHTS]), parameter)
    if found := _OPTIMIZER.fullmatch(name):
        return About(name, spec, frozenset([found["key"]]), found["parameter"], found["owner"])
    return About(name, spec, frozenset([OTHER]), "")


@dataclass(frozen=True)
class _BasePieces:
    """The same pieces in another checkpoint, however that one is divided."""

    base: StoredShards
    pieces: Mapping[str, Piece]

    def __contains__(self, name: object) -> bool:
        piece = self.pieces.get(str(name))
        tensors = self.base.manifest.tensors
        return (
            piece is not None
            and piece.tensor in tensors
            and tensors[piece.tensor].spec == piece.spec
        )

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a piece."""
        return Spec.of(self.pieces[name].data)

    def load(self, name: str, each: Each) -> Tensor:
        """Read a piece from whichever files hold it."""
        piece = self.pieces[name]
        return self.base.region(piece.tensor, piece.box, each)


def _decay_since(base: StoredShards | None, whole: Mapping[str, Any]) -> Callable[[About], float]:
    """Return a function that tells by what a second moment was multiplied since the base."""
    betas = _second_betas(whole)

    def decay(about: About) -> float:
        name = f"{about.owner.removeprefix(PREFIX)}.step"
        now, beta = _number(whole.get(name)), betas.get(about.parameter)
        if base is None or now is None or beta is None or name not in base.manifest.tensors:
            return 1.0
        if base.manifest.tensors[name].spec != Spec(torch.float32, ()):
            return 1.0
        return faded(beta, float(base.region(name, Box((), ()))), now)

    return decay


def _second_betas(whole: Mapping[str, Any]) -> dict[str, float]:
    """Return the beta2 of each parameter that an optimizer names."""
    betas: dict[str, float] = {}
    for name, names in whole.items():
        group, _, last = name.rpartition(".")
        pair = whole.get(f"{group}.betas")
        if last == "params" and isinstance(names, list) and isinstance(pair, tuple | list):
            betas |= {str(parameter): float(pair[1]) for parameter in names}
    return betas


def _number(x: Any) -> float | None:
    """Return the value of a plain tensor of one number."""
    return float(x) if type(x) is Tensor and x.numel() == 1 else None
