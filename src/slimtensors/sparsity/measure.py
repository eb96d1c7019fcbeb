"""How sparse a tensor is, at memory speed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import bitmask24
from slimtensors.errors import ConfigError
from slimtensors.spec import as_bytes, serially

_SIGNED_ZERO = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""Where the top bit alone means -0.0; in other dtypes it means a number or NaN."""


@dataclass(frozen=True)
class Zeros:
    """How many items of a tensor are zero."""

    items: int
    zero: int
    """Items whose bits are all zero."""
    negative: int
    """Floats that are -0.0: zero to arithmetic, but not to a lossless codec."""


def count_zeros(x: Tensor) -> Zeros:
    """Count the zeros of a tensor in main memory."""
    zero, negative = _core.count_zeros(as_bytes(x), x.element_size())
    return Zeros(x.numel(), zero, negative if x.dtype in _SIGNED_ZERO else 0)


def is_24(x: Tensor) -> bool:
    """Tell whether every four neighbours in a row have at most two nonzero items."""
    if x.dim() == 0 or x.shape[-1] % 4:
        return False
    items, itemsize = as_bytes(x), x.element_size()
    # The first few already tell for most tensors that are not.
    return _fits(items[: itemsize << 14], itemsize) and _fits(items, itemsize)


def _fits(items: Tensor, itemsize: int) -> bool:
    try:
        bitmask24.select_mask(items, itemsize, items.numel() // itemsize, serially)
    except ConfigError:
        return False
    return True
