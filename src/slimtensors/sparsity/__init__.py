"""Sparsity: measuring it, and describing it in `config.json`."""

from slimtensors.sparsity.config import (
    BitmaskConfig,
    Sparse24BitmaskConfig,
    SparsityConfig,
    parse_section,
)
from slimtensors.sparsity.measure import (
    Sparsity,
    Zeros,
    combined,
    count_zeros,
    is_24,
    sparsity_of,
    sparsity_of_rows,
    stacked,
)
from slimtensors.sparsity.positions import mask_plan

__all__ = [
    "BitmaskConfig",
    "Sparse24BitmaskConfig",
    "Sparsity",
    "SparsityConfig",
    "Zeros",
    "combined",
    "count_zeros",
    "is_24",
    "mask_plan",
    "parse_section",
    "sparsity_of",
    "sparsity_of_rows",
    "stacked",
]
