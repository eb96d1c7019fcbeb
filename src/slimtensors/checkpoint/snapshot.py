"""Snapshots: copies of a training state in reused memory, from which a thread can save."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slimtensors.archive.tree import flatten
from slimtensors.archive.write import memory_key
from slimtensors.checkpoint.store import FlatState
from slimtensors.tensor import Spec, allocate, check_storable, copy_into, dense_strides, to_cpu

_FOREACH_DTYPES = {
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.uint8,
}
"""Dtypes that are copied in one call; others may lack a copy kernel."""

_Layout = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]
"""Dtype, shape, strides, and whether the memory is pinned."""


class Snapshot:
    """Reusable memory for a copy of a state, pinned for tensors of CUDA devices."""

    def __init__(self) -> None:
        self._buffers: dict[_Layout, list[Tensor]] = {}
        """Memory of the previous copy. The layout alone decides where a buffer is reused: names
        and ties may change between two copies."""

    def take(self, state: Mapping[str, Any]) -> FlatState:
        """Return a copy of a state, which overwrites the previous copy.

        Names that share memory share a copy; different memory never does. Strides are kept where
        they are a permutation of contiguous ones.
        """
        found, tree = flatten(state)
        tensors = {name: check_storable(name, value) for name, value in found.items()}
        addresses = Counter(x.data_ptr() for x in tensors.values())
        free = {layout: iter(buffers) for layout, buffers in self._buffers.items()}
        used: dict[_Layout, list[Tensor]] = {}
        targets: dict[object, Tensor] = {}
        copies: dict[str, Tensor] = {}
        pairs: list[tuple[Tensor, Tensor]] = []
        for name, x in tensors.items():
            # Tied tensors stay tied; the full comparison is needed for equal addresses only.
            key = memory_key(x) if addresses[x.data_ptr()] > 1 else name
            if key not in targets:
                if x.is_quantized:  # an empty tensor would lack the scales
                    targets[key] = x.detach().cpu().clone()
                else:
                    layout = x.dtype, x.shape, dense_strides(x), x.is_cuda
                    copy = next(free.get(layout, iter(())), None)
                    copy = _allocate(*layout) if copy is None else copy
                    used.setdefault(layout, []).append(copy)
                    pairs.append((copy, x))
                    targets[key] = copy
            copies[name] = targets[key]
        # After the loop, because copying evicts the loop's data from the CPU caches.
        _copy_all(pairs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._buffers = used
        return FlatState(copies, tree, state)


@torch.no_grad()
def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second tensor of each pair into the first, most of them in one call."""
    batch = [pair for pair in pairs if pair[1].dtype in _FOREACH_DTYPES or pair[1].is_cuda]
    if batch:
        targets, sources = map(list, zip(*batch, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for target, x in pairs:
        if not (x.dtype in _FOREACH_DTYPES or x.is_cuda):
            copy_into(target, to_cpu(x))


def _allocate(
    dtype: torch.dtype, shape: torch.Size, strides: tuple[int, ...], is_pinned: bool
) -> Tensor:
    if is_pinned:
        return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=True)
    return allocate(Spec(dtype, (shape.numel(),))).as_strided(shape, strides)
