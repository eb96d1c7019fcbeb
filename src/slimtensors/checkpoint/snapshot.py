"""Snapshots: a copy of a state, in memory that is used again for the next one."""

from collections import Counter
from collections.abc import Mapping, Sequence
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
        found, tree = flatten(state)
        tensors = {name: check_storable(name, value) for name, value in found.items()}
        at = Counter(x.data_ptr() for x in tensors.values())
        copies: dict[object, Tensor] = {}
        taken: dict[str, Tensor] = {}
        todo: list[tuple[Tensor, Tensor]] = []
        for name, x in tensors.items():
            # What is tied stays tied; that most are not, their addresses tell sooner.
            key = view_of_memory(x) if at[x.data_ptr()] > 1 else name
            if key not in copies:
                copies[key] = self._room(name, x)
                todo.append((copies[key], x))
            taken[name] = copies[key]
        # After the loop: copying leaves nothing in the caches that it could use.
        _copy_all(todo)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held = taken
        return FlatState(taken, tree, state)

    def _room(self, name: str, x: Tensor) -> Tensor:
        """Return memory for a copy: what was used before, if it still fits."""
        if x.is_quantized:
            return x.detach().cpu().clone()  # an empty one would lack the scales
        copy = self._held.get(name)
        if copy is None or copy.dtype != x.dtype or copy.shape != x.shape:
            return _pinned(x) if x.is_cuda else empty(Spec.of(x))
        return copy


@torch.no_grad()
def _copy_all(todo: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, the usual ones in one call: a state has hundreds."""
    usual = [pair for pair in todo if pair[1].dtype in _USUAL or pair[1].is_cuda]
    if usual:
        targets, sources = map(list, zip(*usual, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for copy, x in todo:
        if not (x.dtype in _USUAL or x.is_cuda or x.is_quantized):
            as_bytes(copy).copy_(as_bytes(on_cpu(x)))  # as bytes: some dtypes have no copy kernel


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
