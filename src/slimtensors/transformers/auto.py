"""Auto classes that load and save compressed models."""

from typing import Any, ClassVar

import transformers
from torch import nn

from slimtensors.errors import ConfigError
from slimtensors.folder.compress import holds_sparse_parts
from slimtensors.folder.convert import COMPRESSED_TENSORS, dtype_of, quantization_of
from slimtensors.runtime import CompressedTensor
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, dtype_name
from slimtensors.transformers.calibrate import saved_class
from slimtensors.transformers.quantizer import METHOD
from slimtensors.transformers.saving import enable, is_enabled
from slimtensors.transformers.weights import QUANTIZED


class SparseAuto:
    """Loads models like an Auto class of transformers, and enables them."""

    auto: ClassVar[Any]
    """The class of transformers that does the work."""

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: StrPath,
        *args: Any,
        run_compressed: bool = False,
        **options: Any,
    ) -> Any:
        """Load a model, compressed or not; its `save_pretrained` can compress.

        Also loads folders that compressed-tensors quantized, or up to 0.14 made sparse. With
        `run_compressed`, linear layers that are stored quantized or sparse stay so in memory. Other
        options are those of transformers.
        """
        options = _with_our_reader(model_name_or_path, options, run_compressed=run_compressed)
        loaded = cls.auto.from_pretrained(model_name_or_path, *args, **options)
        model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
        if not is_enabled(model):
            enable(model)
        return (model, *info) if info else model

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """Make a model with random weights; its `save_pretrained` can compress."""
        return enable(cls.auto.from_config(config, **options))


def _with_our_reader(
    path: StrPath, options: dict[str, Any], *, run_compressed: bool
) -> dict[str, Any]:
    """Return options that make transformers ask us about a folder, if it is one that we read."""
    if "config" in options:
        if run_compressed:
            raise ConfigError(
                "run_compressed: cannot be given together with a config; say it there:"
                " config.quantization_config['run_compressed'] = True"
            )
        return options
    config, rest = transformers.AutoConfig.from_pretrained(
        path, return_unused_kwargs=True, **options
    )
    section = _our_section(config.to_dict())
    if section is None:
        if run_compressed:
            raise ConfigError(f"{path}: is not compressed; load it without run_compressed")
        return options
    if hasattr(config, "compression_config"):
        del config.compression_config
    config.quantization_config = section | ({"run_compressed": True} if run_compressed else {})
    return {**rest, "config": config}


def _our_section(data: Json) -> Json | None:
    """Return what `config.json` has to say for us to read the weights; none if others do."""
    section = data.get("quantization_config")
    if isinstance(section, dict) and section.get("quant_method") == METHOD:
        return section
    if holds_sparse_parts(data):
        return {"quant_method": METHOD, "preset": "sparse"}
    sections = {key: data.get(key) for key in ("quantization_config", "compression_config")}
    before = {key: x for key, x in sections.items() if isinstance(x, dict)}
    kinds = {x.get("quant_method", COMPRESSED_TENSORS) for x in before.values()}
    if kinds != {COMPRESSED_TENSORS} or quantization_of(before) is None:
        return None
    said = dtype_of(data)
    section = {"quant_method": METHOD, "preset": QUANTIZED, "before": before}
    return section | ({"dtype": dtype_name(said)} if said else {})


def sparse(auto: Any) -> Any:
    """Return a class that loads as `auto` does, and whatever we know."""
    about = f"`{auto.__name__}` of transformers, for models that can be saved compressed."
    return type(f"Sparse{auto.__name__}", (SparseAuto,), {"auto": auto, "__doc__": about})


SparseAutoModel = sparse(transformers.AutoModel)
SparseAutoModelForAudioClassification = sparse(transformers.AutoModelForAudioClassification)
SparseAutoModelForCTC = sparse(transformers.AutoModelForCTC)
SparseAutoModelForCausalLM = sparse(transformers.AutoModelForCausalLM)
SparseAutoModelForDepthEstimation = sparse(transformers.AutoModelForDepthEstimation)
SparseAutoModelForImageClassification = sparse(transformers.AutoModelForImageClassification)
SparseAutoModelForImageSegmentation = sparse(transformers.AutoModelForImageSegmentation)
SparseAutoModelForImageTextToText = sparse(transformers.AutoModelForImageTextToText)
SparseAutoModelForMaskedLM = sparse(transformers.AutoModelForMaskedLM)
SparseAutoModelForMultipleChoice = sparse(transformers.AutoModelForMultipleChoice)
SparseAutoModelForObjectDetection = sparse(transformers.AutoModelForObjectDetection)
SparseAutoModelForPreTraining = sparse(transformers.AutoModelForPreTraining)
SparseAutoModelForQuestionAnswering = sparse(transformers.AutoModelForQuestionAnswering)
SparseAutoModelForSemanticSegmentation = sparse(transformers.AutoModelForSemanticSegmentation)
SparseAutoModelForSeq2SeqLM = sparse(transformers.AutoModelForSeq2SeqLM)
SparseAutoModelForSequenceClassification = sparse(transformers.AutoModelForSequenceClassification)
SparseAutoModelForSpeechSeq2Seq = sparse(transformers.AutoModelForSpeechSeq2Seq)
SparseAutoModelForTokenClassification = sparse(transformers.AutoModelForTokenClassification)


def load_model(model: nn.Module | StrPath) -> Any:
    """Return a model with plain weights, by the class that saved it; one in memory as it is.

    One in memory whose weights are compressed there raises.
    """
    if isinstance(model, nn.Module):
        _check_plain(model)
        return model
    return enable(sparse(saved_class(model)).from_pretrained(model))


def load_tokenizer(model: nn.Module | StrPath) -> Any | None:
    """Return the tokenizer that comes with a folder or a name, if any."""
    where = model.name_or_path if hasattr(model, "name_or_path") else model
    if isinstance(where, nn.Module) or not where:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(where)
    except (OSError, ValueError):
        return None


def _check_plain(model: nn.Module) -> None:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_missing = isinstance(module, nn.Linear) and not isinstance(weight, nn.Parameter)
        if is_missing or isinstance(weight, CompressedTensor):
            raise ConfigError(
                f"{name}: has no plain weight, as it is compressed in memory; pass the folder of"
                " the model, or load it by SparseAutoModel without run_compressed"
            )
