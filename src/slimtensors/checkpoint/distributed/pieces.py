"""Pieces of tensors that a rank saves, and the metadata that describes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slimtensors.checkpoint.distributed.manifest import (
    Box,
    DistributedManifest,
    Keys,
    StoredChunk,
    StoredObject,
    StoredTensor,
)
from slimtensors.checkpoint.store import FlatState
from slimtensors.errors import CorruptFileError, MismatchError, UnsupportedTensorError
from slimtensors.tensor import Json, Spec

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


@dataclass(frozen=True)
class Written:
    """What a rank tells of an item that it has written."""

    file: str
    bytes: int
    """The size of the file."""
    error: float | None = None
    """The largest relative RMS error of its pieces; none if it is exact."""
    note: str = ""
    """Why it is exact although it was to be rounded."""


def to_metadata(manifest: DistributedManifest) -> Metadata:
    """Return what planners want to know of a checkpoint."""
    found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
        name: _tensor_metadata(tensor) for name, tensor in manifest.tensors.items()
    }
    found |= {name: BytesStorageMetadata() for name in manifest.objects}
    paths = {name: tensor.path for name, tensor in manifest.tensors.items() if tensor.path}
    paths |= {name: value.path for name, value in manifest.objects.items() if value.path}
    return Metadata(found, planner_data=paths or None)


def stored_tables(
    metadata: Metadata, results: Sequence[Sequence[WriteResult]]
) -> tuple[dict[str, StoredTensor], dict[str, StoredObject], dict[str, int]]:
    """Return the tensors, the objects and the files of a checkpoint.

    Raise if anything that was planned has not been written, or the other way round.
    """
    written = {result.index: result.storage_data for part in results for result in part}
    files = {item.file: item.bytes for item in written.values()}
    numbers = {file: i for i, file in enumerate(files)}
    paths = _paths(metadata.planner_data)
    tensors: dict[str, StoredTensor] = {}
    objects: dict[str, StoredObject] = {}
    missing: list[str] = []

    def number(index: MetadataIndex) -> int:
        if index not in written:
            missing.append(index.fqn)
            return 0
        return numbers[written.pop(index).file]

    for name, about in metadata.state_dict_metadata.items():
        if isinstance(about, BytesStorageMetadata):
            objects[name] = StoredObject(number(MetadataIndex(name)), paths.get(name))
            continue
        chunks = tuple(
            StoredChunk(
                Box(tuple(c.offsets), tuple(c.sizes)), number(MetadataIndex(name, c.offsets))
            )
            for c in about.chunks
        )
        spec = Spec(about.properties.dtype, tuple(about.size))
        tensors[name] = StoredTensor(spec, chunks, paths.get(name))
    if missing or written:
        more = f"; not planned: {next(iter(written)).fqn}" if written else ""
        listed = ", ".join(missing[:5])
        raise MismatchError(f"{len(missing)} items were planned and not written: {listed}{more}")
    return tensors, objects, files


def _tensor_metadata(tensor: StoredTensor) -> TensorStorageMetadata:
    chunks = [
        ChunkStorageMetadata(torch.Size(chunk.box.at), torch.Size(chunk.box.shape))
        for chunk in tensor.chunks
    ]
    properties = TensorProperties(dtype=tensor.spec.dtype)
    return TensorStorageMetadata(properties, torch.Size(tensor.spec.shape), chunks)


def _paths(planner_data: Any) -> Mapping[str, Keys]:
    """Return where in the nested state each value is; raise if a planner says something else."""
    if planner_data is None:
        return {}
    fine = isinstance(planner_data, Mapping) and all(
        isinstance(path, tuple) and all(type(key) in (str, int) for key in path)
        for path in planner_data.values()
    )
    if not fine:
        kind = type(planner_data).__name__
        raise UnsupportedTensorError(f"the planner's own data ({kind}) cannot be stored as JSON")
    return dict(planner_data)
