"""Quantize a model folder with data: the model is built by transformers, and run on it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimtensors.archive import Archive, save
from slimtensors.archive.summary import Summary
from slimtensors.compat.compressor import ModelCompressor
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.folder.compress import without_any_section
from slimtensors.folder.convert import Rewrite, main_dtype
from slimtensors.folder.job import remake
from slimtensors.quantization import QuantizationConfig, QuantizationScheme, quantize_model
from slimtensors.recipe.calibration import Calibration, Data, batches_for
from slimtensors.storage import SINGLE, StrPath, locate
from slimtensors.tensor import Json

_LOG = logging.getLogger(__name__)


def calibrate_folder(
    source: StrPath,
    target: StrPath,
    config: QuantizationConfig,
    dataset: Any,
    *,
    method: str = "gptq",
    calibration: Calibration | None = None,
    dtype: torch.dtype | None = None,
    how: Rewrite | None = None,
) -> Summary:
    """Quantize a model folder layer by layer on data, in the dialect `compressed-tensors`.

    `dataset` is texts, or the path of a file of them. The model is in memory as a whole, and runs
    in `dtype` if that is given; what is written is in its own dtype. Less data than asked for is
    told by a warning in the log.
    """
    how = how or Rewrite()
    amount = calibration or Calibration()
    if amount.evaluate is not None:
        raise ConfigError("a folder is quantized without measuring it: evaluate goes with oneshot")
    data = Data.of(dataset)  # raises if there is none, before the model is built
    model, tokenizer = _built(source, dtype)
    if dtype is not None:
        with Archive(source, storage_options=how.storage_options) as archive:
            own = main_dtype(archive)
        config = _with_scales_in(config, own)
    batches, notes = batches_for(model, data, amount, tokenizer=tokenizer)
    for note in notes:
        _LOG.warning("%s: %s", source, note)
    quantize_model(model, config, calibration=batches, method=method, folder=amount.work)
    compressor = ModelCompressor(quantization_config=config)
    state = compressor.compress(model)
    if dtype is not None:
        state = {name: x.to(own) if x.dtype is dtype else x for name, x in state.items()}

    def put(folder: Path) -> Summary:
        return save(
            state,
            folder if how.max_shard_size is not None else folder / SINGLE,
            preset="dense",
            max_shard_size=how.max_shard_size,
            threads=how.threads,
            progress=how.progress,
        )

    def edit(data: Json, _: Summary) -> Json:
        section: Json = model.config.quantization_config
        return {**without_any_section(data), "quantization_config": section}

    where = locate(source, storage_options=how.storage_options)
    return remake(where, target, put, edit, sources=[source], replace=how.replace)


def _with_scales_in(config: QuantizationConfig, dtype: torch.dtype) -> QuantizationConfig:
    """Return a config whose scales are those that `dtype` can hold, where it says nothing else."""

    def scheme(old: QuantizationScheme) -> QuantizationScheme:
        if old.weights is None or old.weights.scale_dtype is not None:
            return old
        return replace(old, weights=replace(old.weights, scale_dtype=dtype))

    groups = {name: scheme(group) for name, group in config.config_groups.items()}
    return replace(config, config_groups=groups)


def _built(source: StrPath, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return the model and its tokenizer; the class of the model is the one that saved it."""
    try:
        import transformers
    except ImportError:
        raise MissingDependencyError("transformers", "transformers") from None
    kind = saved_class(source)
    model: nn.Module = kind.from_pretrained(source, dtype=dtype or "auto").eval()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: has no tokenizer, which calibration needs: {error}"
        ) from error
    return model, tokenizer


def saved_class(source: StrPath) -> Any:
    """Return the class of transformers that saved a model, which is in a folder or has a name."""
    import transformers

    names: Sequence[str] = transformers.AutoConfig.from_pretrained(source).architectures or ()
    if (kind := find_class(names)) is None:
        raise ConfigError(f"{source}: config.json names no class of transformers: {list(names)}")
    return kind


def find_class(names: Sequence[str]) -> Any | None:
    """Return the first of these classes that transformers has, if any."""
    import transformers

    return next(
        (getattr(transformers, name) for name in names if hasattr(transformers, name)), None
    )
