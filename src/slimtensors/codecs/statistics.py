"""Statistics of tensors: sparsity, sparsity patterns, order-0 entropy."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import is_24
from slimtensors.tensor import Zeros, as_bytes, count_zeros, has_signed_zero

__all__ = [
    "Sparsity",
    "Zeros",
    "count_zeros",
    "is_24",
    "merge",
    "merge_rows",
    "order0",
    "sparsity_of",
    "sparsity_of_rows",
]

GROUPS = (4, 8, 16, 32)
"""Group sizes of the sparsity patterns that are detected."""

_SPARSE = 0.05
"""Fraction of zeros above which a tensor counts as sparse."""
_FILLED = 0.75
"""Minimum fill of the groups, relative to the pattern. With few random zeros some group is full,
and with many all groups are nearly empty: neither is a pattern."""


@dataclass(frozen=True)
class Sparsity:
    """Sparsity of a tensor or of a model, and its pattern."""

    items: int = 0
    zero: int = 0
    """Items equal to 0.0 or -0.0."""
    kept: int = 0
    """Nonzero items of the sparse matrices."""
    places: int = 0
    """All items of the sparse matrices."""
    peaks: dict[int, int] = field(default_factory=dict)
    """Group size -> maximum number of nonzero items in a group, if rows consist of whole groups."""

    @property
    def share(self) -> float:
        """The fraction of zeros."""
        return self.zero / self.items if self.items else 0.0

    @property
    def structure(self) -> str:
        """The pattern, such as `2:4` (at most two of four neighbours are nonzero)."""
        for group, most in sorted(self.peaks.items()):
            if 0 < most < group and self.kept >= _FILLED * self.places * most / group:
                return f"{most}:{group}"
        return "unstructured"


def sparsity_of(x: Tensor) -> Sparsity:
    """Return the sparsity of a tensor in main memory."""
    zero = _zeros_of_both_signs(x)
    if x.dim() < 2 or zero < _SPARSE * x.numel():
        return Sparsity(x.numel(), zero)
    return _in_groups(x, zero)


def sparsity_of_rows(x: Tensor) -> Sparsity:
    """Return the sparsity of rows, without deciding whether their matrix is sparse."""
    return _in_groups(x, _zeros_of_both_signs(x))


def _zeros_of_both_signs(x: Tensor) -> int:
    zeros = count_zeros(x)
    return zeros.zero + zeros.negative


def _in_groups(x: Tensor, zero: int) -> Sparsity:
    found = _core.group_peaks(as_bytes(x), x.element_size(), has_signed_zero(x.dtype))
    peaks = {n: most for n, most in zip(GROUPS, found, strict=True) if x.shape[-1] % n == 0}
    return Sparsity(x.numel(), zero, x.numel() - zero, x.numel(), peaks)


def merge_rows(rows: Iterable[Sparsity]) -> Sparsity:
    """Return the sparsity of a matrix from the results of `sparsity_of_rows`."""
    merged = merge(rows)
    return merged if merged.zero >= _SPARSE * merged.items else Sparsity(merged.items, merged.zero)


def merge(parts: Iterable[Sparsity]) -> Sparsity:
    """Return the overall sparsity of several tensors; the pattern is common to all sparse ones."""
    all_parts = list(parts)
    sparse = [part for part in all_parts if part.places]
    common = set(GROUPS).intersection(*(part.peaks for part in sparse)) if sparse else set()
    return Sparsity(
        sum(part.items for part in all_parts),
        sum(part.zero for part in all_parts),
        sum(part.kept for part in sparse),
        sum(part.places for part in sparse),
        {group: max(part.peaks[group] for part in sparse) for group in sorted(common)},
    )


_RANDOM = 7.9
"""Entropy in bits above which a mantissa byte counts as random."""


def order0(x: Tensor) -> float:
    """Return the order-0 entropy of a tensor in main memory, in bits.

    Integers count by byte. Of floats, exponents count by their entropy, and mantissas by their
    size unless they have a pattern. Zeros count as a mask if that is less. It is a lower bound for
    codes with one model for all items; codes that model rows or regions may need less.
    """
    bits = _planes(x)
    zero = _core.count_zeros(as_bytes(x), x.element_size())[0]
    if zero == 0:
        return bits
    values = Bitmask().encode(x)["values"]
    return min(bits, _entropy(np.array([zero, x.numel() - zero])) + _planes(values))


def _planes(x: Tensor) -> float:
    """Return the sum of the entropies of the byte planes."""
    itemsize = x.element_size() // 2 if x.is_complex() else x.element_size()
    is_rotated = (x.is_floating_point() or x.is_complex()) and itemsize > 1
    counts = np.empty((itemsize, 256), np.uint64)
    _core.count_bytes(as_bytes(x), itemsize, is_rotated, counts.view(np.uint8).reshape(-1))
    items = x.nbytes // itemsize
    total = 0.0
    for plane in counts:
        bits = _entropy(plane)
        total += 8 * items if is_rotated and bits > _RANDOM * items else bits
    return total


def _entropy(counts: NDArray[np.uint64]) -> float:
    found = counts[counts > 0].astype(np.float64)
    return float((found * np.log2(found.sum() / found)).sum())
