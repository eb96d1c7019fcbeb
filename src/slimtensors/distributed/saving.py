"""Write the file of one rank."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from slimtensors import presets
from slimtensors.archive.write import write
from slimtensors.delta import lossless_only
from slimtensors.distributed.coding import How, coded
from slimtensors.distributed.share import Piece, file_name, share
from slimtensors.plan import Plan
from slimtensors.presets import Chooser

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
    how: How,
    preset: str | Plan | Chooser,
    whole: Mapping[str, Any],
    threads: int | None,
) -> SavedShare:
    """Write all that a rank has to store; `whole` is the state that all ranks save, flat."""
    named = {piece.name: piece for piece in pieces}
    path = order.folder / file_name(order.rank)
    content = coded(share(order.run, order.rank, pieces, objects), named, how, whole)
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
