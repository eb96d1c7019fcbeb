"""What codecs of chunks share: where chunks lie, and how pieces become one part."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def room(count: int) -> Tensor:
    """Return so many bytes with any content."""
    return torch.empty(count, dtype=torch.uint8)


def joined(pieces: Sequence[Tensor]) -> Tensor:
    """Lay pieces end to end; torch.cat would wake its own threads for it."""
    return torch.from_numpy(np.concatenate([piece.numpy() for piece in pieces]))


def times(chunks: slice, size: int) -> slice:
    """Return where the bytes of some chunks lie that have `size` bytes each."""
    return slice(chunks.start * size, chunks.stop * size)


def in_groups(chunks: int, size: int) -> list[slice]:
    """Divide chunks into groups of `size`, the last one of what is left."""
    return [slice(i, min(i + size, chunks)) for i in range(0, chunks, size)]
