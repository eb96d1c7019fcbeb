"""Ranks that publish the shards of one model together: `DTensor`, as of FSDP2."""

import json
from collections.abc import Mapping
from typing import Protocol, cast

import torch
from torch import Tensor

from slimtensors.checkpoint.distributed.pieces import Box
from slimtensors.errors import UnsupportedTensorError
from slimtensors.tensor import Json


class Ranks(Protocol):
    """The processes that publish together."""

    rank: int
    count: int

    def gather(self, data: Json) -> list[Json]:
        """Return the data of all ranks; called by background threads, in the same order."""
        ...

    def max(self, value: int) -> int:
        """Return the largest value of all ranks; called by main threads, in the same order."""
        ...


class OneRank:
    """A process that publishes a whole model."""

    rank, count = 0, 1

    def gather(self, data: Json) -> list[Json]:
        """Return the data."""
        return [data]

    def max(self, value: int) -> int:
        """Return the value."""
        return value


class GlooRanks:
    """All ranks of the default process group."""

    def __init__(self) -> None:
        from torch import distributed

        self.rank, self.count = distributed.get_rank(), distributed.get_world_size()
        # Groups of their own: background threads must not mix with the collectives of training.
        self._background = distributed.new_group(backend="gloo")
        self._foreground = distributed.new_group(backend="gloo")

    def gather(self, data: Json) -> list[Json]:
        """Return the data of all ranks, sent as JSON."""
        from torch import distributed

        text = torch.frombuffer(bytearray(json.dumps(data).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        distributed.all_gather(sizes, torch.tensor([text.numel()]), group=self._background)
        longest = max(int(size) for size in sizes)
        texts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.count)]
        padded = torch.nn.functional.pad(text, (0, longest - text.numel()))
        distributed.all_gather(texts, padded, group=self._background)
        pairs = zip(texts, sizes, strict=True)
        return [json.loads(bytes(text[: int(size)].tolist())) for text, size in pairs]

    def max(self, value: int) -> int:
        """Return the largest value of all ranks."""
        from torch import distributed

        found = torch.tensor([value])
        distributed.all_reduce(found, distributed.ReduceOp.MAX, group=self._foreground)
        return int(found)


def join_ranks(tensors: Mapping[str, Tensor]) -> Ranks:
    """Return all ranks if the model has shards, else this process alone."""
    return GlooRanks() if any(map(is_sharded, tensors.values())) else OneRank()


def is_sharded(x: Tensor) -> bool:
    """Return True if a tensor is a `DTensor`."""
    if type(x) in (Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(x, DTensor)


def find_shard(name: str, x: Tensor, rank: int) -> tuple[Box, Tensor] | None:
    """Return the part of a tensor that this rank stores, or None: each part is stored once."""
    if not is_sharded(x):
        return (Box.whole(tuple(x.shape)), x) if rank == 0 else None
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded = cast(DTensor, x)
    mesh, placements = sharded.device_mesh, sharded.placements
    if any(placement.is_partial() for placement in placements):
        raise UnsupportedTensorError(f"{name}: a DTensor with partial sums cannot be published")
    position = mesh.get_coordinate()
    if position is None:
        return None
    pairs = zip(position, placements, strict=True)
    if any(at and placement.is_replicate() for at, placement in pairs):
        return None  # the first replica stores it
    shape, offset = compute_local_shape_and_global_offset(x.shape, mesh, placements)
    box = Box(tuple(offset), tuple(shape))
    if not box.numel and (x.numel() or any(position)):
        return None
    return box, sharded.to_local()
