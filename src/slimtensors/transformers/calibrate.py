"""Quantize a model folder with calibration data: run the model and quantize layer by layer."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from slimtensors.archive import Archive
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, as_source, write
from slimtensors.codecs import presets
from slimtensors.compat.compressor import ModelCompressor
from slimtensors.errors import ConfigError
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    describe_codes,
    read_config,
    read_dtype,
    replace_sections,
)
from slimtensors.folder.convert import SLIM, main_dtype
from slimtensors.folder.job import replace_weights
from slimtensors.folder.weights import FolderOptions
from slimtensors.quantization import QuantizationConfig, QuantizationScheme, quantize_model
from slimtensors.recipe.calibration import Calibration, Data, batches_for
from slimtensors.storage import INDEX, SINGLE, StrPath, check_separate, locate, note_parameters
from slimtensors.tensor import Json
from slimtensors.transformers.auto import find_model_class
from slimtensors.transformers.weights import encode_layers

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
    dialect: str = COMPRESSED_TENSORS,
    how: FolderOptions | None = None,
) -> Summary:
    """Quantize a model folder layer by layer with calibration data.

    The whole model is loaded into memory. If there is less data than requested, a warning is
    logged.

    Args:
        source: model folder.
        target: folder or URL to write.
        config: layers to quantize and their schemes.
        dataset: texts, or the path of a file of texts.
        method: `gptq` or `rtn`.
        calibration: amount of data, and how it is made from texts.
        dtype: dtype to run the model in; the result has the dtype of the source.
        dialect: `compressed-tensors` or `slim`.
        how: shard size, threads and other options, as for `quantize_folder`.

    Example:
        >>> from slimtensors.quantization import QuantizationConfig
        >>> config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        >>> calibrate_folder("my-model", "my-w4a16", config, "text.txt")
    """
    options = how or FolderOptions()
    settings = calibration or Calibration()
    if settings.evaluate is not None:
        raise ConfigError("calibrate_folder does not support Calibration.evaluate; use oneshot")
    targets = [target] if settings.work is None else [target, settings.work]
    for to in targets:
        check_separate(locate(to, storage_options=options.storage_options), [source])
    data = Data.of(dataset)  # raises for missing data before the model is loaded
    model, tokenizer = _load(source, dtype)
    with Archive(source, storage_options=options.storage_options) as archive:
        location, stored_dtype = archive.location, main_dtype(archive)
    if dtype is not None:
        config = _set_scale_dtype(config, stored_dtype)
    batches, notes = batches_for(model, data, settings, tokenizer=tokenizer)
    for note in notes:
        _LOG.warning("%s: %s", source, note)
    quantize_model(model, config, calibration=batches, method=method, folder=settings.work)
    state = ModelCompressor(quantization_config=config).compress(model)
    section: Json = model.config.quantization_config
    if dtype is not None:
        state = {name: x.to(stored_dtype) if x.dtype is dtype else x for name, x in state.items()}
    tensors = as_source(state)
    preset = presets.dense
    if dialect == SLIM:
        stored_dtype = read_dtype(read_config(location)) or stored_dtype
        tensors = ArchiveSource(encode_layers(tensors.items, section, stored_dtype), tensors.tied)
        preset = presets.lossless

    def put(folder: Path) -> Summary:
        path = folder if options.max_shard_size is not None else folder / SINGLE
        # The dialect slim stores the parts of compressed-tensors as plain tensors.
        summary = write(tensors, path, options.with_preset(preset)).summary()
        if dialect == SLIM:
            note_parameters(folder / INDEX, summary.items)
        return summary

    def edit(config: Json, summary: Summary) -> Json:
        if dialect == SLIM:
            return describe_codes(config, summary, stored_dtype)
        return replace_sections(config, section)

    return replace_weights(location, target, put, edit, sources=[source], options=options)


def _load(source: StrPath, dtype: torch.dtype | None) -> tuple[Any, Any]:
    """Return the model, in the class that saved it, and its tokenizer."""
    kind = find_model_class(source)
    model: nn.Module = kind.from_pretrained(source, dtype=dtype or "auto").eval()
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source}: calibration needs a tokenizer, which cannot be loaded: {error}"
        ) from error
    return model, tokenizer


def _set_scale_dtype(config: QuantizationConfig, dtype: torch.dtype) -> QuantizationConfig:
    """Return a config with scales in `dtype`, unless it sets their dtype."""

    def set_dtype(scheme: QuantizationScheme) -> QuantizationScheme:
        if scheme.weights is None or scheme.weights.scale_dtype is not None:
            return scheme
        return replace(scheme, weights=replace(scheme.weights, scale_dtype=dtype))

    groups = {name: set_dtype(group) for name, group in config.config_groups.items()}
    return replace(config, config_groups=groups)
