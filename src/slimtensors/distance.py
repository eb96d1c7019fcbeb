"""How large tensors are, and how far apart."""

import math

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.spec import as_bytes, dtype_name

_BY_CORE = (torch.float32, torch.float16, torch.bfloat16)


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of a tensor of floats."""
    if x.dtype not in _BY_CORE:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return math.sqrt(_core.sum_of_squares(as_bytes(x), dtype_name(x.dtype)))


def relative_distance(found: Tensor, given: Tensor) -> float:
    """Return the RMS of the difference of two tensors, relative to the RMS of the second."""
    whole = norm(given)
    if not whole:
        return 0.0
    if found.dtype != given.dtype or given.dtype not in _BY_CORE:
        return norm(found.double() - given.double()) / whole
    kind = dtype_name(given.dtype)
    return math.sqrt(_core.squared_distance(as_bytes(found), as_bytes(given), kind)) / whole
