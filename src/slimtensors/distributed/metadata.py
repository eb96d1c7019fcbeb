"""Between our manifest and the metadata of torch.distributed.checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from slimtensors.distributed.boxes import Box
from slimtensors.distributed.manifest import (
    Chunk,
    Keys,
    Manifest,
    StoredObject,
    StoredTensor,
)
from slimtensors.errors import MismatchError, UnsupportedTensorError
from slimtensors.spec import Spec


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


def to_metadata(manifest: Manifest) -> Metadata:
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
            Chunk(Box(tuple(c.offsets), tuple(c.sizes)), number(MetadataIndex(name, c.offsets)))
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
