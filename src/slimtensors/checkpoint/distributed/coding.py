"""Encoding of the pieces of a rank, and the file that they are written to."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from slimtensors.archive.delta import require_lossless
from slimtensors.archive.write import WriteOptions, source_from_tensors, write
from slimtensors.checkpoint.coding import Decay, StateEncoder, compute_decay
from slimtensors.checkpoint.distributed.pieces import (
    PREFIX,
    Box,
    KeyPath,
    Piece,
    build_rank_state,
    format_file_name,
    format_offset,
)
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.checkpoint.profiles import OTHER, WEIGHTS, Filter, Profile, StateTensorInfo
from slimtensors.checkpoint.store import FlatState
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Chooser
from slimtensors.parallel import Each
from slimtensors.tensor import Spec

_OPTIMIZER = re.compile(r"(?P<owner>(?:.*\.)?state\.(?P<parameter>.+))\.(?P<key>[^.]+)")
_STEP = re.compile(r"(?:.*\.)?state\..+\.step")

Value = TypeVar("Value", float, str)


@dataclass(frozen=True)
class CodingOptions:
    """Options that determine how pieces are stored."""

    preset: str | Plan | Chooser
    profile: Profile
    lossy: Filter | None
    """Selects the tensors that the profile may round; None selects all."""
    base: StoredShards | None
    threads: int | None

    @property
    def is_plain(self) -> bool:
        """Whether all pieces are stored whole and exact."""
        return self.base is None and self.profile.is_exact


@dataclass(frozen=True)
class RankAssignment:
    """Where a rank writes its file; the coordinator sends it with the global plan."""

    run: str
    folder: Path | None
    """The shared temporary folder; None if each rank uploads its file."""
    rank: int


@dataclass(frozen=True)
class RankFileInfo:
    """Result of `write_rank_file`."""

    file: str
    bytes: int
    errors: Mapping[str, float]
    """Largest relative RMS error among the pieces of each tensor that is not exact."""
    kept_exact: Mapping[str, str]
    """Tensors of which pieces should have been rounded but were stored exactly, with the reason."""


def write_rank_file(
    folder: Path,
    assignment: RankAssignment,
    pieces: Sequence[Piece],
    objects: Mapping[str, Any],
    full_state: Mapping[str, Any],
    options: CodingOptions,
) -> RankFileInfo:
    """Write the file of a rank; `full_state` is the flat state that all ranks save together."""
    by_name = {piece.name: piece for piece in pieces}
    state = build_rank_state(assignment.run, assignment.rank, pieces, objects)
    choose = presets.find(options.preset)
    errors: Mapping[str, float] = {}
    kept_exact: Mapping[str, str] = {}
    if options.is_plain:
        source = source_from_tensors(state.tensors, state.tree)
        choose = _restrict_to_pieces(choose, by_name)
    else:
        encoder = _make_encoder(state, by_name, full_state, options)
        source = encoder.build_source(state.tree)
        errors, kept_exact = encoder.errors, encoder.kept_exact
        choose = require_lossless(choose)
    path = folder / format_file_name(assignment.rank)
    writing = WriteOptions(preset=choose, threads=options.threads)
    summary = write(source, path, writing).summary()
    measured = {t.name: t.error for t in summary.tensors if t.error is not None}
    return RankFileInfo(
        path.name,
        path.stat().st_size,
        _take_maximum({**measured, **errors}, by_name),
        _take_maximum(kept_exact, by_name),
    )


def describe_tensor(name: str, spec: Spec, path: KeyPath | None) -> StateTensorInfo:
    """Return the role of a tensor, given the names that torch's `get_state_dict` produces."""
    if path is None or len(path) == 1 or path[0] in ("model", "state_dict"):
        parameter = name if path is None or len(path) == 1 else name.partition(".")[2]
        return StateTensorInfo(name, spec, frozenset([WEIGHTS]), parameter)
    if found := _OPTIMIZER.fullmatch(name):
        roles = frozenset([found["key"]])
        return StateTensorInfo(name, spec, roles, found["parameter"], found["owner"])
    return StateTensorInfo(name, spec, frozenset([OTHER]), "")


def _make_encoder(
    state: FlatState,
    pieces: Mapping[str, Piece],
    full_state: Mapping[str, Any],
    options: CodingOptions,
) -> StateEncoder:
    infos = {
        name: StateTensorInfo(name, Spec.of(x), frozenset([OTHER]), "")
        for name, x in state.tensors.items()
    }
    lossy_names: set[str] = set()
    for name, piece in pieces.items():
        info = describe_tensor(piece.tensor, piece.spec, piece.path)
        if options.lossy is None or options.lossy(info):
            lossy_names.add(name)
        infos[name] = replace(
            info,
            name=name,
            spec=Spec.of(piece.data),
            owner=f"{PREFIX}{info.owner}",
            suffix=format_offset(piece.box),
        )
    steps = (_read_scalar(x) for name, x in full_state.items() if _STEP.fullmatch(name))
    return StateEncoder(
        state.tensors,
        infos,
        step=next(steps, None),
        decay=_measure_decay(options.base, full_state),
        profile=options.profile,
        lossy_names=lossy_names,
        base=_BasePieces(options.base, pieces) if options.base else None,
    )


@dataclass(frozen=True)
class _BasePieces:
    """The same pieces in the base, which may be divided in another way."""

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
        """Read and decode a piece."""
        piece = self.pieces[name]
        return self.base.load_region(piece.tensor, piece.box, each)


def _measure_decay(base: StoredShards | None, full_state: Mapping[str, Any]) -> Decay:
    """Return a function that computes the decay of a second moment from the optimizer's steps."""
    betas = _find_second_betas(full_state)

    def decay(info: StateTensorInfo) -> float:
        name = f"{info.owner.removeprefix(PREFIX)}.step"
        step, beta = _read_scalar(full_state.get(name)), betas.get(info.parameter)
        if base is None or step is None or beta is None or name not in base.manifest.tensors:
            return 1.0
        if base.manifest.tensors[name].spec != Spec(torch.float32, ()):
            return 1.0
        return compute_decay(beta, float(base.load_region(name, Box((), ()))), step)

    return decay


def _find_second_betas(full_state: Mapping[str, Any]) -> dict[str, float]:
    """Return the beta2 of each parameter in the groups of an optimizer."""
    betas: dict[str, float] = {}
    for name, parameters in full_state.items():
        group, _, last = name.rpartition(".")
        pair = full_state.get(f"{group}.betas")
        if last == "params" and isinstance(parameters, list) and isinstance(pair, tuple | list):
            betas |= {str(parameter): float(pair[1]) for parameter in parameters}
    return betas


def _read_scalar(x: Any) -> float | None:
    """Return the value of a plain tensor with one element, or None for anything else."""
    return float(x) if type(x) is Tensor and x.numel() == 1 else None


def _restrict_to_pieces(choose: Chooser, pieces: Mapping[str, Piece]) -> Chooser:
    """Return a chooser that keeps tensors inside objects exact: only pieces report errors."""

    def choose_piece(name: str, x: Tensor) -> Any:
        return choose(name, x) if name in pieces else presets.lossless(name, x)

    return choose_piece


def _take_maximum(values: Mapping[str, Value], pieces: Mapping[str, Piece]) -> dict[str, Value]:
    """Return the maximum over the pieces of each tensor."""
    maxima: dict[str, Value] = {}
    for name, value in values.items():
        tensor = pieces[name].tensor
        maxima[tensor] = max(maxima[tensor], value) if tensor in maxima else value
    return maxima
