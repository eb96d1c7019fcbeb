"""Sparsity: measuring it, and describing it in `config.json`."""

from slimtensors.sparsity.config import BitmaskConfig, Sparse24BitmaskConfig, SparsityConfig
from slimtensors.sparsity.measure import Zeros, count_zeros, is_24
from slimtensors.sparsity.positions import mask_plan

__all__ = [
    "BitmaskConfig",
    "Sparse24BitmaskConfig",
    "SparsityConfig",
    "Zeros",
    "count_zeros",
    "is_24",
    "mask_plan",
]
