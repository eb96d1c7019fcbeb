"""Load models with the Auto classes of transformers, from dense or compressed folders.

`SparseAutoModel…` is `AutoModel…` of transformers for folders that it cannot read itself; the
returned model can also save itself compressed (see `enable`).
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import transformers
from torch import Tensor, nn

from slimtensors.archive import Archive
from slimtensors.errors import ConfigError
from slimtensors.folder.config_json import METHOD
from slimtensors.runtime import CompressedTensor
from slimtensors.storage import INDEX, SINGLE, StrPath
from slimtensors.transformers.loading import find_section
from slimtensors.transformers.saving import enable, is_enabled

_TASKS = (
    "",
    "ForAudioClassification",
    "ForCTC",
    "ForCausalLM",
    "ForDepthEstimation",
    "ForImageClassification",
    "ForImageSegmentation",
    "ForImageTextToText",
    "ForMaskedLM",
    "ForMultipleChoice",
    "ForObjectDetection",
    "ForPreTraining",
    "ForQuestionAnswering",
    "ForSemanticSegmentation",
    "ForSeq2SeqLM",
    "ForSequenceClassification",
    "ForSpeechSeq2Seq",
    "ForTokenClassification",
)

AUTO_CLASSES = tuple(f"SparseAutoModel{task}" for task in _TASKS)
"""Names of the classes in this module, which are created on first use."""
SAME_CLASSES = ("SparseAutoConfig", "SparseAutoTokenizer")
"""Names of SparseML for classes of transformers that need no change."""

_WEIGHT_OPTIONS = ("dtype", "torch_dtype", "quantization_config")
"""Options of `from_pretrained` that are not for the config, although it has these attributes."""
_KEPT_OPTIONS = (
    *_WEIGHT_OPTIONS,
    "cache_dir",
    "code_revision",
    "force_download",
    "local_files_only",
    "proxies",
    "revision",
    "subfolder",
    "token",
    "trust_remote_code",
)
"""Options that the weights need too, and that loading the config removes."""


class SparseAuto:
    """Base of the Auto classes: load models with `auto` and enable them.

    Example:
        >>> from slimtensors.transformers import SparseAutoModelForCausalLM
        >>> model = SparseAutoModelForCausalLM.from_pretrained("my-w4a16", run_compressed=True)
        >>> model.save_pretrained("copy")
    """

    auto: ClassVar[Any]
    """The Auto class of transformers."""

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: StrPath | None = None,
        *args: Any,
        run_compressed: bool = False,
        pretrained_model_name_or_path: StrPath | None = None,
        recipe: object = None,
        **options: Any,
    ) -> Any:
        """Load a model from a dense or compressed folder; its `save_pretrained` can compress.

        Also loads folders of compressed-tensors: quantized ones, and sparse ones up to its
        version 0.14.

        Args:
            model_name_or_path: folder, or model name on the hub.
            run_compressed: keep linear layers that are stored quantized or sparse compressed in
                memory.
            pretrained_model_name_or_path: name of the first argument in transformers.
            recipe: option of SparseML; only None, its default, is supported.
            args, options: arguments of `from_pretrained` of transformers.
        """
        path = pretrained_model_name_or_path if model_name_or_path is None else model_name_or_path
        if path is None:
            raise TypeError("from_pretrained() missing the argument 'model_name_or_path'")
        if recipe is not None:
            raise ConfigError(f"recipe={recipe!r} is not supported; call oneshot(model, recipe)")
        return load_pretrained(cls.auto, path, *args, run_compressed=run_compressed, **options)

    @classmethod
    def from_config(cls, config: Any, **options: Any) -> Any:
        """Create a model with random weights; its `save_pretrained` can compress."""
        return enable(cls.auto.from_config(config, **options))


@cache
def _create_class(name: str) -> Any:
    auto = getattr(transformers, name.removeprefix("Sparse"))
    doc = f"`{auto.__name__}` of transformers that also loads compressed folders."
    return type(name, (SparseAuto,), {"auto": auto, "__doc__": doc, "__module__": __name__})


def __getattr__(name: str) -> Any:
    """Create the class `SparseAutoModel…` on first use."""
    if name in AUTO_CLASSES:
        return _create_class(name)
    if name in SAME_CLASSES:
        return getattr(transformers, name.removeprefix("Sparse"))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *AUTO_CLASSES, *SAME_CLASSES})


def load_pretrained(
    auto: Any, path: StrPath, *args: Any, run_compressed: bool = False, **options: Any
) -> Any:
    """Load a model with a class of transformers, from a dense or compressed folder; enable it."""
    _check_path(path)
    options = _add_config(path, options, run_compressed=run_compressed)
    loaded = auto.from_pretrained(path, *args, **options)
    model, *info = loaded if isinstance(loaded, tuple) else (loaded,)
    if not is_enabled(model):
        enable(model)
    return (model, *info) if info else model


def load_model(model: nn.Module | StrPath) -> Any:
    """Load a model with dense weights by the class that saved it; return a module unchanged.

    Raise `ConfigError` for a module whose weights are compressed in memory.
    """
    if isinstance(model, nn.Module):
        _check_dense(model)
        return model
    return enable(load_pretrained(find_model_class(model), model))


def load_tokenizer(model: nn.Module | StrPath) -> Any | None:
    """Return the tokenizer of a folder or model name, or None if there is none."""
    path = model.name_or_path if hasattr(model, "name_or_path") else model
    if isinstance(path, nn.Module) or not path:
        return None
    try:
        return transformers.AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, ImportError):
        return None


def find_model_class(source: StrPath) -> Any:
    """Return the class of transformers that saved a model, given its folder or name."""
    _check_path(source)
    names: Sequence[str] = transformers.AutoConfig.from_pretrained(source).architectures or ()
    if not names:
        raise ConfigError(f"{source}: config.json has no 'architectures'; add the model class")
    if (found := find_class(names)) is None:
        raise ConfigError(
            f"{source}: 'architectures' in config.json names no class of transformers:"
            f" {list(names)}"
        )
    return found


def find_class(names: Sequence[str]) -> Any | None:
    """Return the first of these classes that transformers defines, or None."""
    return next(
        (getattr(transformers, name) for name in names if hasattr(transformers, name)), None
    )


def _add_config(path: StrPath, options: dict[str, Any], *, run_compressed: bool) -> dict[str, Any]:
    """Add a config that selects our loader to the options, if the folder needs it."""
    if "config" in options:
        if run_compressed:
            raise ConfigError(
                "run_compressed cannot be combined with config; set"
                " config.quantization_config['run_compressed'] = True instead"
            )
        return options
    given = {key: value for key, value in options.items() if key not in _WEIGHT_OPTIONS}
    config, rest = transformers.AutoConfig.from_pretrained(path, return_unused_kwargs=True, **given)
    section = find_section(config.to_dict())
    if section is None and not hasattr(config, "quantization_config"):
        folder = Path(path, options.get("subfolder") or "")
        section = {"quant_method": METHOD, "preset": "dense"} if _has_parts(folder) else None
    if section is None:
        if run_compressed:
            raise ConfigError(f"{path} is not compressed; load it without run_compressed")
        return options
    if hasattr(config, "compression_config"):
        del config.compression_config
    config.quantization_config = section | ({"run_compressed": True} if run_compressed else {})
    kept = {key: value for key, value in options.items() if key in _KEPT_OPTIONS}
    return {**rest, **kept, "config": config}


def _has_parts(folder: Path) -> bool:
    """Return True if the weights of a local folder are stored in parts, whatever its config."""
    if not any((folder / name).is_file() for name in (SINGLE, INDEX)):
        return False
    return any(key != name for key, name in Archive(folder).owners.items())


def _check_path(path: StrPath) -> None:
    if str(path).startswith("zoo:"):
        raise ConfigError(f"{path}: the SparseZoo is offline; pass a folder or a name on the hub")


def _check_dense(model: nn.Module) -> None:
    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        is_missing = isinstance(module, nn.Linear) and not isinstance(weight, Tensor)
        if is_missing or isinstance(weight, CompressedTensor):
            raise ConfigError(
                f"{name}: the weight is compressed in memory; pass the folder of the model, or"
                " load it with SparseAutoModel without run_compressed"
            )
