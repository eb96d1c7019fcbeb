"""Pruning: which weights of a model can go, and what the others do about it."""

from slimtensors.pruning.allocation import by_outliers, per_block, per_target
from slimtensors.pruning.driver import prune_model
from slimtensors.pruning.methods import Magnitude, Method, SparseGPT, Wanda, Wanted
from slimtensors.pruning.sparsegpt import sparsegpt
from slimtensors.pruning.structure import (
    Blocks,
    Groups,
    Rows,
    Structure,
    Unstructured,
    parse_structure,
)
from slimtensors.pruning.targets import find_layers, fitting_layers

__all__ = [
    "Blocks",
    "Groups",
    "Magnitude",
    "Method",
    "Rows",
    "SparseGPT",
    "Structure",
    "Unstructured",
    "Wanda",
    "Wanted",
    "by_outliers",
    "find_layers",
    "fitting_layers",
    "parse_structure",
    "per_block",
    "per_target",
    "prune_model",
    "sparsegpt",
]
