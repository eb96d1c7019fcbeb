"""What a recipe is made of: one thing to do to a model, each a frozen dataclass."""

from slimtensors.recipe.modifiers.fields import Sparsity
from slimtensors.recipe.modifiers.names import MODIFIERS, make, name_of, written
from slimtensors.recipe.modifiers.pruning import (
    ConstantPruning,
    MagnitudePruning,
    SparseGPT,
    Wanda,
)
from slimtensors.recipe.modifiers.quantizing import AWQ, GPTQ, Mapped, Quantize, SmoothQuant
from slimtensors.recipe.modifiers.training import (
    Distillation,
    GradualMagnitudePruning,
    MovementPruning,
)

Pruning = MagnitudePruning | Wanda | SparseGPT
Quantizing = Quantize | GPTQ | AWQ
Training = GradualMagnitudePruning | MovementPruning | Distillation
"""What only `train` can do."""
Modifier = Pruning | ConstantPruning | Quantizing | SmoothQuant | Training

__all__ = [
    "AWQ",
    "GPTQ",
    "MODIFIERS",
    "ConstantPruning",
    "Distillation",
    "GradualMagnitudePruning",
    "MagnitudePruning",
    "Mapped",
    "Modifier",
    "MovementPruning",
    "Pruning",
    "Quantize",
    "Quantizing",
    "SmoothQuant",
    "SparseGPT",
    "Sparsity",
    "Training",
    "Wanda",
    "make",
    "name_of",
    "written",
]
