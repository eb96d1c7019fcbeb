"""Memory for results. First touch of fresh 4 KiB pages costs more than decoding into them."""

import mmap
import threading
import time

import torch
from torch import Tensor

from slimtensors.spec import Spec, allocate

_HUGE = 2 << 20
_SLOW = 0.001
"""Seconds to get the first huge page from which on small ones are faster. Clearing one takes a
fifth of that, but a virtual machine may have to get the memory back from its host first."""
_WORTHWHILE = 2 * _HUGE
"""Smaller results come from torch's allocator, which reuses pages it already has."""


_kept = threading.local()


def scratch(nbytes: int) -> Tensor:
    """Return memory that the next call on the same thread may return again."""
    room: Tensor | None = getattr(_kept, "room", None)
    if room is None or room.nbytes < nbytes:
        room = _kept.room = empty(Spec(torch.uint8, (nbytes,)))
    return room


def empty(like: Spec) -> Tensor:
    """Allocate a tensor, on huge pages where it is large and the system has them."""
    if like.nbytes < _WORTHWHILE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return allocate(like)
    # Private, because the module's default is shared memory, which gets no huge pages.
    pages = mmap.mmap(-1, like.nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE
    # The tensor keeps `pages` alive; what lies before and after it is never touched.
    raw = torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=like.nbytes)
    begin = time.perf_counter()
    raw[0] = 0
    if time.perf_counter() - begin > _SLOW:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return raw.view(like.dtype).view(like.shape)
