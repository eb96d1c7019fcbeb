"""Statistics of tensors: zeros, sparsity patterns, order-0 entropy."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import bitmask24
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.errors import ConfigError
from slimtensors.parallel import serially
from slimtensors.tensor import as_bytes

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


GROUPS = (4, 8, 16, 32)
"""Sizes of groups in which we look for a structure."""

_SPARSE = 0.05
"""The share of zeros from which on a tensor is sparse."""
_FILLED = 0.75
"""How full the groups of a structured tensor are at least, of what the structure allows: few random
zeros leave any group full, and many leave every group nearly empty."""


@dataclass(frozen=True)
class Sparsity:
    """How sparse a tensor or a whole model is, and in which groups."""

    items: int = 0
    zero: int = 0
    """Items that are 0.0 or -0.0."""
    kept: int = 0
    """Nonzero items of matrices that are sparse at all."""
    places: int = 0
    """All items of these matrices."""
    peaks: dict[int, int] = field(default_factory=dict)
    """The most nonzero items in any group of these matrices, where rows are whole groups."""

    @property
    def share(self) -> float:
        """The fraction of items that is zero."""
        return self.zero / self.items if self.items else 0.0

    @property
    def structure(self) -> str:
        """`2:4` and the like, where at most so many of so many neighbours are kept."""
        for group, most in sorted(self.peaks.items()):
            if 0 < most < group and self.kept >= _FILLED * self.places * most / group:
                return f"{most}:{group}"
        return "unstructured"


def sparsity_of(x: Tensor) -> Sparsity:
    """Measure a tensor in main memory."""
    zero = _zeros_of_both_signs(x)
    if x.dim() < 2 or zero < _SPARSE * x.numel():
        return Sparsity(x.numel(), zero)
    return _in_groups(x, zero)


def sparsity_of_rows(x: Tensor) -> Sparsity:
    """Measure some rows of a matrix, which may be sparse even where these are not."""
    return _in_groups(x, _zeros_of_both_signs(x))


def _zeros_of_both_signs(x: Tensor) -> int:
    zeros = count_zeros(x)
    return zeros.zero + zeros.negative


def _in_groups(x: Tensor, zero: int) -> Sparsity:
    signed = x.dtype in _SIGNED_ZERO
    found = _core.group_peaks(as_bytes(x), x.element_size(), signed)
    peaks = {n: most for n, most in zip(GROUPS, found, strict=True) if x.shape[-1] % n == 0}
    return Sparsity(x.numel(), zero, x.numel() - zero, x.numel(), peaks)


def stacked(rows: Iterable[Sparsity]) -> Sparsity:
    """Return what `sparsity_of` would say of a matrix whose rows were measured piece by piece."""
    whole = combined(rows)
    return whole if whole.zero >= _SPARSE * whole.items else Sparsity(whole.items, whole.zero)


def combined(found: Iterable[Sparsity]) -> Sparsity:
    """Return the sparsity of all tensors together; a structure is one that all sparse ones have."""
    every = list(found)
    sparse = [one for one in every if one.places]
    common = set(GROUPS).intersection(*(one.peaks for one in sparse)) if sparse else set()
    return Sparsity(
        sum(one.items for one in every),
        sum(one.zero for one in every),
        sum(one.kept for one in sparse),
        sum(one.places for one in sparse),
        {group: max(one.peaks[group] for one in sparse) for group in sorted(common)},
    )


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


_NOT_WORTHWHILE = 7.9
"""Bits above which a byte of the mantissa counts as random."""


def order0(x: Tensor) -> float:
    """Return the order-0 entropy of a tensor in main memory, in bits.

    The bytes of integers count each for itself; of floats only the exponents, and mantissas as
    they are unless they have a pattern. Where that is less, zeros count as a mask. It is a bound
    for codes that treat all items alike; who finds rows or regions that differ needs less.
    """
    bits = _planes(x)
    zero = _core.count_zeros(as_bytes(x), x.element_size())[0]
    if zero == 0:
        return bits
    values = Bitmask().encode(x)["values"]
    return min(bits, _entropy(np.array([zero, x.numel() - zero])) + _planes(values))


def _planes(x: Tensor) -> float:
    """Return the sum of the entropies of the lowest bytes of all items, the next ones, …."""
    itemsize = x.element_size() // 2 if x.is_complex() else x.element_size()
    is_rotated = (x.is_floating_point() or x.is_complex()) and itemsize > 1
    counts = np.empty((itemsize, 256), np.uint64)
    _core.count_bytes(as_bytes(x), itemsize, is_rotated, counts.view(np.uint8).reshape(-1))
    items = x.nbytes // itemsize
    total = 0.0
    for plane in counts:
        bits = _entropy(plane)
        total += 8 * items if is_rotated and bits > _NOT_WORTHWHILE * items else bits
    return total


def _entropy(counts: NDArray[np.uint64]) -> float:
    found = counts[counts > 0].astype(np.float64)
    return float((found * np.log2(found.sum() / found)).sum())
