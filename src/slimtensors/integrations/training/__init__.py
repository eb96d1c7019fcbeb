"""Training by a recipe, with the Trainer of transformers."""

import slimtensors.integrations.transformers  # noqa: F401 - says what to install if it is missing
from slimtensors.integrations.training.report import TrainedStage, TrainingReport
from slimtensors.integrations.training.run import train

__all__ = ["TrainedStage", "TrainingReport", "train"]
