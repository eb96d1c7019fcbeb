"""Scales that are powers of two, stored as a byte: the exponent plus 127."""

import torch
from torch import Tensor

from slimtensors.errors import CorruptFileError


def exponents_of(scale: Tensor) -> Tensor:
    """Return the exponents of powers of two."""
    return (127 + scale.log2().floor()).to(torch.int32).to(torch.uint8)


def powers_of(exponents: Tensor) -> Tensor:
    """Return the powers as bf16, which has all of them."""
    if exponents.dtype is not torch.uint8:
        raise CorruptFileError(f"weight_scale is {exponents.dtype}, not exponents (uint8)")
    return torch.exp2(exponents.float() - 127).to(torch.bfloat16)
