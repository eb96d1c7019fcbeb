"""What keeps a model sparse while it is trained: torch alone, for any loop and any optimizer."""

from slimtensors.recipe.training.distillation import answers_divergence, divergence
from slimtensors.recipe.training.gradual import GradualMasks
from slimtensors.recipe.training.held import HeldMasks
from slimtensors.recipe.training.movement import MovementMasks
from slimtensors.recipe.training.schedule import Schedule

__all__ = [
    "GradualMasks",
    "HeldMasks",
    "MovementMasks",
    "Schedule",
    "answers_divergence",
    "divergence",
]
