"""transformers with compressed folders: `import slimtensors.transformers` is all it takes.

Registers our format, so that `AutoModel….from_pretrained` loads such folders and `save_pretrained`
of what was loaded writes them.
"""

from slimtensors.folder import compress_folder, decompress_folder
from slimtensors.integrations.training import train
from slimtensors.integrations.transformers.auto import (
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
from slimtensors.integrations.transformers.oneshot import oneshot
from slimtensors.integrations.transformers.peak import measure_memory
from slimtensors.integrations.transformers.saving import enable
from slimtensors.recipe import Calibration, Recipe
from slimtensors.transformers import compression

__all__ = [
    "Calibration",
    "Recipe",
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
    "compress_folder",
    "compression",
    "decompress_folder",
    "enable",
    "measure_memory",
    "oneshot",
    "train",
]
