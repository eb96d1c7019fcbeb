"""Scales that are powers of two, stored as a byte: the exponent plus 127."""

import torch
from torch import Tensor

from slimtensors.errors import CorruptFileError


def exponents_of(scale: Tensor) -> Tensor:
    """Return the exponents of powers of two."""
    return (127 + scale.log2().floor()).to(torch.int32).to(torch.uint8)


def check_exponents(scale: Tensor) -> Tensor:
    """Return stored scales if they are exponents."""
    if scale.dtype is not torch.uint8:
        raise CorruptFileError(f"weight_scale is {scale.dtype}, not exponents (uint8)")
    return scale
