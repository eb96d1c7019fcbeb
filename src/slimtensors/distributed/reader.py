"""Load through `torch.distributed.checkpoint`, whatever number of ranks have saved."""

import io
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as Reader
from torch.futures import Future

from slimtensors.archive.workers import Workers
from slimtensors.container import StrPath, local
from slimtensors.distributed.boxes import Box
from slimtensors.distributed.metadata import to_metadata
from slimtensors.distributed.stored import StoredShards
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.spec import fill


@dataclass(frozen=True)
class _Job:
    """A piece to decode, and the parts of it that are wanted somewhere."""

    tensor: str
    piece: Box
    file: int
    bytes: int
    targets: list[tuple[Box, Tensor]] = field(default_factory=list)


class StorageReader(Reader):
    """A storage reader for `dcp.load`, into any number of ranks and any layout.

    A rank decodes the pieces that it needs, each once. A delta needs its base, by default the
    folder of that name beside it.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        base: StrPath | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = None if path is None else local(path)
        self._base, self._threads = base, threads
        self._stored: StoredShards | None = None

    @property
    def decoded_bytes(self) -> int:
        """Bytes that this rank decoded in the last load, to see what another layout costs."""
        return self._stored.decoded_bytes if self._stored else 0

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin to read another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = local(checkpoint_id)
        self._stored = None

    def read_metadata(self) -> Metadata:
        """Read what the checkpoint holds."""
        if self.checkpoint_id is None:
            raise ConfigError("which one? Give StorageReader a path, or dcp.load a checkpoint_id")
        base = local(self._base) if self._base is not None else None
        self._stored = StoredShards(self.checkpoint_id, base=base)
        metadata = to_metadata(self._stored.manifest)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check, on one rank for all, that every file is there and no other."""
        if is_coordinator:
            self._opened().check_files()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan: there is nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans: there is nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode what this rank needs, straight to where it belongs."""
        stored = self._opened()
        jobs: dict[tuple[str, Box], _Job] = {}
        tensors: list[tuple[ReadItem, Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(stored.value(item.storage_index.fqn)))
                continue
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                shapes = f"{tuple(item.lengths)} to read, {tuple(target.shape)} to fill"
                raise MismatchError(f"{item.storage_index.fqn}: {shapes}")
            _add_jobs(jobs, stored, item, target)
            tensors.append((item, target))
        with Workers(self._threads) as workers:

            def one(job: _Job) -> None:
                x = stored.piece(job.tensor, job.piece, job.file, workers.each)
                for box, target in job.targets:
                    part = box.overlap(job.piece)
                    assert part is not None
                    fill(part.of(target, box), part.of(x, job.piece))

            deque(workers.in_order(one, jobs.values(), lambda job: job.bytes), maxlen=0)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Tell whether this can be a place of checkpoints: a local path."""
        return "://" not in str(checkpoint_id)

    def _opened(self) -> StoredShards:
        assert self._stored is not None, "read_metadata comes first"
        return self._stored


def _add_jobs(
    jobs: dict[tuple[str, Box], _Job], stored: StoredShards, item: ReadItem, target: Tensor
) -> None:
    """Add the pieces that an item needs to those that others need."""
    name, at = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    chunk = stored.chunk(name, at, item.storage_index.index)
    begin = tuple(map(sum, zip(at, item.storage_offsets, strict=True)))
    wanted = Box(begin, tuple(item.lengths))
    if not wanted.numel:
        return
    for piece in stored.pieces(name, chunk.box, wanted):
        size = piece.numel * stored.manifest.tensors[name].spec.dtype.itemsize
        job = jobs.setdefault((name, piece), _Job(name, piece, chunk.file, size))
        job.targets.append((wanted, target))


def _saved(value: Any) -> io.BytesIO:
    """Return a value in the form in which planners take it: made here, in memory, from JSON."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
