"""The Auto classes of transformers, for models that can be saved compressed."""

from typing import Any, ClassVar

import transformers

from slimtensors.container import StrPath
from slimtensors.folder import holds_sparse_parts
from slimtensors.integrations.transformers.config import METHOD
from slimtensors.integrations.transformers.saving import enable, is_enabled


class SparseAuto:
    """Loads models like an Auto class of transformers, and enables them."""

    auto: ClassVar[Any]
    """The class of transformers that does the work."""

    @classmethod
    def from_pretrained(cls, model_name_or_path: StrPath, *args: Any, **options: Any) -> Any:
        """Load a model, compressed or not; its `save_pretrained` can compress.

        Also loads sparse folders that compressed-tensors up to 0.14 wrote. Options are those of
        transformers.
        """
        options = _with_our_reader(model_name_or_path, options)
        loaded = cls.auto.from_pretrained(model_name_or_path, *args, **options)
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        if not is_enabled(model):
            enable(model)
        return (model, *info) if info else model

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """Make a model with random weights; its `save_pretrained` can compress."""
        return enable(cls.auto.from_config(config, **options))


def _with_our_reader(path: StrPath, options: dict[str, Any]) -> dict[str, Any]:
    """Return options that make transformers ask us about a sparse folder of compressed-tensors."""
    if "config" in options:
        return options
    config, rest = transformers.AutoConfig.from_pretrained(
        path, return_unused_kwargs=True, **options
    )
    if not holds_sparse_parts(config.to_dict()):
        return options
    for section in ("compression_config", "quantization_config"):
        if hasattr(config, section):
            delattr(config, section)
    config.quantization_config = {"quant_method": METHOD, "preset": "sparse"}
    return {**rest, "config": config}


def _sparse(auto: Any) -> type[SparseAuto]:
    about = f"`{auto.__name__}` of transformers, for models that can be saved compressed."
    return type(f"Sparse{auto.__name__}", (SparseAuto,), {"auto": auto, "__doc__": about})


SparseAutoModel = _sparse(transformers.AutoModel)
SparseAutoModelForAudioClassification = _sparse(transformers.AutoModelForAudioClassification)
SparseAutoModelForCTC = _sparse(transformers.AutoModelForCTC)
SparseAutoModelForCausalLM = _sparse(transformers.AutoModelForCausalLM)
SparseAutoModelForDepthEstimation = _sparse(transformers.AutoModelForDepthEstimation)
SparseAutoModelForImageClassification = _sparse(transformers.AutoModelForImageClassification)
SparseAutoModelForImageSegmentation = _sparse(transformers.AutoModelForImageSegmentation)
SparseAutoModelForImageTextToText = _sparse(transformers.AutoModelForImageTextToText)
SparseAutoModelForMaskedLM = _sparse(transformers.AutoModelForMaskedLM)
SparseAutoModelForMultipleChoice = _sparse(transformers.AutoModelForMultipleChoice)
SparseAutoModelForObjectDetection = _sparse(transformers.AutoModelForObjectDetection)
SparseAutoModelForPreTraining = _sparse(transformers.AutoModelForPreTraining)
SparseAutoModelForQuestionAnswering = _sparse(transformers.AutoModelForQuestionAnswering)
SparseAutoModelForSemanticSegmentation = _sparse(transformers.AutoModelForSemanticSegmentation)
SparseAutoModelForSeq2SeqLM = _sparse(transformers.AutoModelForSeq2SeqLM)
SparseAutoModelForSequenceClassification = _sparse(transformers.AutoModelForSequenceClassification)
SparseAutoModelForSpeechSeq2Seq = _sparse(transformers.AutoModelForSpeechSeq2Seq)
SparseAutoModelForTokenClassification = _sparse(transformers.AutoModelForTokenClassification)
