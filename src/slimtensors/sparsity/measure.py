"""How sparse a tensor is, at memory speed."""

from dataclasses import dataclass

from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import bitmask24
from slimtensors.errors import ConfigError
from slimtensors.spec import as_bytes, serially


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
    return Zeros(x.numel(), zero, negative if x.is_floating_point() else 0)


def is_24(x: Tensor) -> bool:
    """Tell whether every four neighbours in a row have at most two nonzero items."""
    if x.dim() == 0 or x.shape[-1] % 4:
        return False
    flat = x.contiguous().view(-1)
    return _fits(flat[: 1 << 14]) and _fits(flat)  # the first few already tell most others


def _fits(flat: Tensor) -> bool:
    try:
        bitmask24.select_mask(flat, flat.numel(), serially)
    except ConfigError:
        return False
    return True
