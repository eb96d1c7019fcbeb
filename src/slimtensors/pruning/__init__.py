"""Pruning: which weights of a model can go, and what the others do about it."""

from slimtensors.pruning.structure import (
    Blocks,
    Groups,
    Rows,
    Structure,
    Unstructured,
    parse_structure,
)

__all__ = ["Blocks", "Groups", "Rows", "Structure", "Unstructured", "parse_structure"]
