"""Recipes: lists of modifiers that make a model sparse and quantized."""

from slimtensors.recipe.calibration import Calibration
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
from slimtensors.recipe.report import LayerState, Quality, Report, Step

__all__ = [
    "AWQ",
    "GPTQ",
    "Calibration",
    "ConstantPruning",
    "Distillation",
    "GradualMagnitudePruning",
    "LayerState",
    "MagnitudePruning",
    "Modifier",
    "MovementPruning",
    "Quality",
    "Quantize",
    "Recipe",
    "Report",
    "SmoothQuant",
    "SparseGPT",
    "Stage",
    "Step",
    "Wanda",
]
