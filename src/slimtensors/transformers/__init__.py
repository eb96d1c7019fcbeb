"""transformers with compressed folders: `import slimtensors.transformers` is all it takes.

Registers our format, so that `AutoModel….from_pretrained` loads such folders and `save_pretrained`
of what was loaded writes them.
"""

from slimtensors.errors import MissingDependencyError

try:
    from transformers import core_model_loading as _needed  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("transformers 5.22 or later", "transformers") from error

from slimtensors.folder.compress import compress_folder, decompress_folder
from slimtensors.recipe import Calibration, Recipe
from slimtensors.transformers import compression
from slimtensors.transformers.auto import (
    SparseAutoModel,
    SparseAutoModelForAudioClassification,
    SparseAutoModelForCausalLM,
    SparseAutoModelForCTC,
    SparseAutoModelForDepthEstimation,
    SparseAutoModelForImageClassification,
    SparseAutoModelForImageSegmentation,
    SparseAutoModelForImageTextToText,
    SparseAutoModelForMaskedLM,
    SparseAutoModelForMultipleChoice,
    SparseAutoModelForObjectDetection,
    SparseAutoModelForPreTraining,
    SparseAutoModelForQuestionAnswering,
    SparseAutoModelForSemanticSegmentation,
    SparseAutoModelForSeq2SeqLM,
    SparseAutoModelForSequenceClassification,
    SparseAutoModelForSpeechSeq2Seq,
    SparseAutoModelForTokenClassification,
)
from slimtensors.transformers.memory import measure_memory
from slimtensors.transformers.oneshot import oneshot
from slimtensors.transformers.quantizer import SlimConfig, SlimQuantizer
from slimtensors.transformers.saving import enable
from slimtensors.transformers.stage import TrainedStage, TrainingReport
from slimtensors.transformers.train import train

__all__ = [
    "Calibration",
    "Recipe",
    "SlimConfig",
    "SlimQuantizer",
    "SparseAutoModel",
    "SparseAutoModelForAudioClassification",
    "SparseAutoModelForCTC",
    "SparseAutoModelForCausalLM",
    "SparseAutoModelForDepthEstimation",
    "SparseAutoModelForImageClassification",
    "SparseAutoModelForImageSegmentation",
    "SparseAutoModelForImageTextToText",
    "SparseAutoModelForMaskedLM",
    "SparseAutoModelForMultipleChoice",
    "SparseAutoModelForObjectDetection",
    "SparseAutoModelForPreTraining",
    "SparseAutoModelForQuestionAnswering",
    "SparseAutoModelForSemanticSegmentation",
    "SparseAutoModelForSeq2SeqLM",
    "SparseAutoModelForSequenceClassification",
    "SparseAutoModelForSpeechSeq2Seq",
    "SparseAutoModelForTokenClassification",
    "TrainedStage",
    "TrainingReport",
    "compress_folder",
    "compression",
    "decompress_folder",
    "enable",
    "measure_memory",
    "oneshot",
    "train",
]
