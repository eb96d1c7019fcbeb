"""Recipes: what to do to a model so that it becomes sparse and quantized."""

from slimtensors.recipe.modifiers import (
    AWQ,
    GPTQ,
    ConstantPruning,
    Distillation,
    GradualMagnitudePruning,
    MagnitudePruning,
    Modifier,
    MovementPruning,
    Quantize,
    SmoothQuant,
    SparseGPT,
    Wanda,
)
from slimtensors.recipe.recipe import Recipe, Stage

__all__ = [
    "AWQ",
    "GPTQ",
    "ConstantPruning",
    "Distillation",
    "GradualMagnitudePruning",
    "MagnitudePruning",
    "Modifier",
    "MovementPruning",
    "Quantize",
    "Recipe",
    "SmoothQuant",
    "SparseGPT",
    "Stage",
    "Wanda",
]
