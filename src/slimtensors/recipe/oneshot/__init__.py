"""Recipes in one shot: the model is run, not trained."""

from slimtensors.recipe.oneshot.apply import apply_recipe
from slimtensors.recipe.oneshot.check import check_recipe

__all__ = ["apply_recipe", "check_recipe"]
