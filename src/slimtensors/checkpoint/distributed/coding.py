"""How the pieces of a rank are stored, and the file they are written to."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slimtensors.archive.delta import lossless_only
from slimtensors.archive.write import ArchiveSource, given, write
from slimtensors.checkpoint.coding import Coding, apply_decay
from slimtensors.checkpoint.distributed.manifest import Box, Keys
from slimtensors.checkpoint.distributed.pieces import PREFIX, Piece, file_name, place, share
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.checkpoint.policy import OTHER, WEIGHTS, Filter, Profile, RoleInfo
from slimtensors.checkpoint.store import FlatState
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Chooser
from slimtensors.parallel import Each
from slimtensors.tensor import Spec

_OPTIMIZER = re.compile(r"(?P<owner>(?:.*\.)?state\.(?P<parameter>.+))\.(?P<key>[^.]+)")
_STEP = re.compile(r"(?:.*\.)?state\..+\.step")


@dataclass(frozen=True)
class CodingOptions:
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
class CodedShare:
    """What a rank writes, and what became of it."""

    state: ArchiveSource
    errors: Mapping[str, float]
    """Relative RMS error of each piece that is not exact; complete once all is written."""
    kept_exact: Mapping[str, str]
    """Pieces that were to be rounded and are not, and why."""


def encode_share(
    flat: FlatState, pieces: Mapping[str, Piece], how: CodingOptions, whole: Mapping[str, Any]
) -> CodedShare:
    """Return what to write; `whole` is the state that all ranks save, flat."""
    if how.is_plain:
        return CodedShare(given(flat.tensors, flat.tree), {}, {})
    abouts = {
        name: RoleInfo(name, Spec.of(x), frozenset([OTHER]), "") for name, x in flat.tensors.items()
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
    return CodedShare(coding.state(flat.tree), coding.errors, coding.kept_exact)


def describe(name: str, spec: Spec, path: Keys | None) -> RoleInfo:
    """Say what a tensor is, by the names that torch's `get_state_dict` gives."""
    if path is None or len(path) == 1 or path[0] in ("model", "state_dict"):
        parameter = name if path is None or len(path) == 1 else name.partition(".")[2]
        return RoleInfo(name, spec, frozenset([WEIGHTS]), parameter)
    if found := _OPTIMIZER.fullmatch(name):
        return RoleInfo(name, spec, frozenset([found["key"]]), found["parameter"], found["owner"])
    return RoleInfo(name, spec, frozenset([OTHER]), "")


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


def _decay_since(
    base: StoredShards | None, whole: Mapping[str, Any]
) -> Callable[[RoleInfo], float]:
    """Return a function that tells by what a second moment was multiplied since the base."""
    betas = _second_betas(whole)

    def decay(about: RoleInfo) -> float:
        name = f"{about.owner.removeprefix(PREFIX)}.step"
        now, beta = _number(whole.get(name)), betas.get(about.parameter)
        if base is None or now is None or beta is None or name not in base.manifest.tensors:
            return 1.0
        if base.manifest.tensors[name].spec != Spec(torch.float32, ()):
            return 1.0
        return apply_decay(beta, float(base.region(name, Box((), ()))), now)

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


Value = TypeVar("Value", float, str)


@dataclass(frozen=True)
class Order:
    """What a rank is told before it writes."""

    run: str
    folder: Path
    rank: int


@dataclass(frozen=True)
class SavedShare:
    """The file that a rank has written."""

    file: str
    bytes: int
    errors: Mapping[str, float]
    """The largest relative RMS error of a piece, by the names of tensors."""
    kept_exact: Mapping[str, str]
    """Why tensors, or pieces of them, are exact although they were to be rounded."""


def save_share(
    order: Order,
    pieces: Sequence[Piece],
    objects: Mapping[str, Any],
    *,
    how: CodingOptions,
    preset: str | Plan | Chooser,
    whole: Mapping[str, Any],
    threads: int | None,
) -> SavedShare:
    """Write all that a rank has to store; `whole` is the state that all ranks save, flat."""
    named = {piece.name: piece for piece in pieces}
    path = order.folder / file_name(order.rank)
    content = encode_share(share(order.run, order.rank, pieces, objects), named, how, whole)
    choose = presets.find(preset)
    choose = _exact_elsewhere(choose, named) if how.is_plain else lossless_only(choose)
    summary = write(content.state, path, preset=choose, dialect="slim", threads=threads)
    by_preset = {t.name: t.error for t in summary.tensors if t.error is not None}
    return SavedShare(
        path.name,
        path.stat().st_size,
        _by_tensor({**by_preset, **content.errors}, named, max),
        _by_tensor(content.kept_exact, named, max),
    )


def _exact_elsewhere(choose: Chooser, pieces: Mapping[str, Piece]) -> Chooser:
    """Return a rule that rounds no tensor within an object: errors are told of pieces alone."""

    def chosen(name: str, x: Tensor) -> Any:
        return choose(name, x) if name in pieces else presets.lossless(name, x)

    return chosen


def _by_tensor(
    found: Mapping[str, Value], pieces: Mapping[str, Piece], pick: Callable[[Value, Value], Value]
) -> dict[str, Value]:
    """Return one of the values of each tensor's pieces."""
    picked: dict[str, Value] = {}
    for name, value in found.items():
        tensor = pieces[name].tensor
        picked[tensor] = pick(picked[tensor], value) if tensor in picked else value
    return picked
