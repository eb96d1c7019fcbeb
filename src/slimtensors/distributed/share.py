"""A rank's share: the pieces of tensors and the objects that go into its file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.checkpoint.io import FlatState
from slimtensors.distributed.boxes import Box
from slimtensors.distributed.manifest import Keys
from slimtensors.errors import CorruptFileError
from slimtensors.spec import Json, Spec

PREFIX = "tensors."
"""How the names of all pieces begin."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a tensor."""

    tensor: str
    """The name of the tensor."""
    spec: Spec
    """Of the whole tensor."""
    path: Keys | None
    """Where the tensor is in the nested state."""
    box: Box
    data: Tensor

    @property
    def name(self) -> str:
        """What it is called in its file: `tensors.NAME@ROW,COLUMN`."""
        return piece_name(self.tensor, self.box)


def piece_name(tensor: str, box: Box) -> str:
    """Return what a piece of a tensor is called in its file."""
    return f"{PREFIX}{tensor}{place(box)}"


def place(box: Box) -> str:
    """Return how the name of a piece ends."""
    return f"@{','.join(map(str, box.at))}"


def piece_place(name: str) -> tuple[str, tuple[int, ...]]:
    """Return the tensor of which something is a piece, and where it begins."""
    tensor, _, at = name.removeprefix(PREFIX).rpartition("@")
    try:
        return tensor, tuple(int(n) for n in at.split(",") if n)
    except ValueError:
        raise CorruptFileError(f"{name}: is not the name of a piece") from None


def file_name(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def share(run: str, rank: int, pieces: Sequence[Piece], objects: Mapping[str, Any]) -> FlatState:
    """Return all that goes into the file of a rank, as a state."""
    tensors = {piece.name.removeprefix(PREFIX): piece.data for piece in pieces}
    return FlatState.of({"run": run, "rank": rank, "objects": dict(objects), "tensors": tensors})


@dataclass(frozen=True)
class RankTree:
    """What the file of a rank says besides its tensors."""

    run: str
    objects: Mapping[str, Any]
    """Outlines of what is no tensor."""


def rank_tree(tree: Json | None, path: Path) -> RankTree:
    """Parse the outline of a rank's file."""
    match tree:
        case {"dict": [["run", str(run)], ["rank", int()], ["objects", {"dict": list(pairs)}], *_]}:
            rows = [pair for pair in pairs if isinstance(pair, list) and len(pair) == 2]
            objects = {name: outline for name, outline in rows if isinstance(name, str)}
            if len(objects) == len(pairs):
                return RankTree(run, objects)
    raise CorruptFileError(f"{path}: is not the file of a rank")
