"""Snapshots: a copy of a state, in memory that is used again for the next one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from slimtensors.archive.state import view_of_memory
from slimtensors.checkpoint.io import FlatState
from slimtensors.memory import empty
from slimtensors.spec import Spec, as_bytes, check_storable, on_cpu
from slimtensors.tree import flatten

_USUAL = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8}


class Snapshot:
    """Memory for one copy of a state, pinned where it comes from a CUDA device."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Any]) -> FlatState:
        """Copy all tensors of a state; what was taken before is overwritten."""
        tensors, tree = flatten(state)
        copies: dict[object, Tensor] = {}
        taken: dict[str, Tensor] = {}
        todo: list[tuple[Tensor, Tensor]] = []
        for name, value in tensors.items():
            x = check_storable(name, value).detach()
            key = view_of_memory(x)
            if key not in copies:  # what is tied stays tied
                copies[key] = self._room(name, x)
                todo.append((copies[key], x))
            taken[name] = copies[key]
        # In a loop of their own: copying leaves nothing in the caches that the one above could use.
        for copy, x in todo:
            _copy(copy, x)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held = taken
        return FlatState(taken, tree, state)

    def _room(self, name: str, x: Tensor) -> Tensor:
        """Return memory for a copy: what was used before, if it still fits."""
        if x.is_quantized:
            return x.cpu().clone()  # an empty one would lack the scales
        copy = self._held.get(name)
        if copy is None or copy.dtype != x.dtype or copy.shape != x.shape:
            return _pinned(x) if x.is_cuda else empty(Spec.of(x))
        return copy


def _copy(copy: Tensor, x: Tensor) -> None:
    if x.dtype in _USUAL or x.is_cuda or x.is_quantized:
        copy.copy_(x, non_blocking=True)
    else:
        as_bytes(copy).copy_(as_bytes(on_cpu(x)))  # as bytes: some dtypes have no copy kernel


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
