"""How many bits a tensor needs if every item is coded by how often its kind occurs."""

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import Bitmask
from slimtensors.spec import as_bytes

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
