"""Compressed models in transformers.

Importing this package registers the format: `AutoModel….from_pretrained` then loads compressed
folders, and `save_pretrained` of a loaded model writes them.

Example:
    >>> import slimtensors.transformers
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained("my-model-slim")
"""

from typing import Any

from slimtensors.errors import MissingDependencyError

try:
    from transformers import core_model_loading as _core_model_loading  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("transformers 5.22 or later", "transformers") from error

from slimtensors.folder.compress import compress_folder, decompress_folder
from slimtensors.recipe import Calibration, Recipe
from slimtensors.transformers import auto, compression
from slimtensors.transformers.fit import Budget, FitReport, fit
from slimtensors.transformers.loading import SlimConfig, SlimQuantizer
from slimtensors.transformers.memory import measure_memory
from slimtensors.transformers.oneshot import oneshot
from slimtensors.transformers.saving import enable
from slimtensors.transformers.train import TrainingReport, train
from slimtensors.transformers.trainer import CheckpointSettings, SlimTrainer
from slimtensors.transformers.training_stage import TrainedStage

__all__ = [
    "Budget",
    "Calibration",
    "CheckpointSettings",
    "FitReport",
    "Recipe",
    "SlimConfig",
    "SlimQuantizer",
    "SlimTrainer",
    "TrainedStage",
    "TrainingReport",
    "compress_folder",
    "compression",
    "decompress_folder",
    "enable",
    "fit",
    "measure_memory",
    "oneshot",
    "train",
]
__all__ += auto.AUTO_CLASSES
__all__ += auto.SAME_CLASSES


def __getattr__(name: str) -> Any:
    """Return a class `SparseAuto…`; those of models are created on first use."""
    if name in auto.AUTO_CLASSES or name in auto.SAME_CLASSES:
        return getattr(auto, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
