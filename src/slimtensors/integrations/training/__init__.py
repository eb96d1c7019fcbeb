"""Training by a recipe, with the Trainer of transformers."""

from slimtensors.integrations.training.report import TrainedStage, TrainingReport
from slimtensors.integrations.training.run import train

__all__ = ["TrainedStage", "TrainingReport", "train"]
