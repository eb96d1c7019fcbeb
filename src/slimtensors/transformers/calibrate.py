"""Quantize a model folder with calibration data: run the model and quantize layer by layer."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import DenseLayer, QuantizationSummary, Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, write
from slimtensors.codecs import presets
from slimtensors.compat.compressor import ModelCompressor
from slimtensors.errors import ConfigError, shorten_list
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    QUANTIZATION_REPORT,
    describe_coded,
    describe_codes,
    read_config,
    read_dtype,
    replace_sections,
)
from slimtensors.folder.convert import SLIM, main_dtype
from slimtensors.folder.job import replace_weights
from slimtensors.folder.quantize import IGNORED, NOT_TARGETED
from slimtensors.folder.weights import FolderOptions
from slimtensors.parallel import Each
from slimtensors.quantization import QuantizationConfig, QuantizationScheme, quantize_model
from slimtensors.quantization.checkpoint_layout import describe_unstorable
from slimtensors.quantization.layers import list_class_names, list_weights
from slimtensors.quantization.state import get_quantization
from slimtensors.quantization.targets import fit_config, matches_any
from slimtensors.recipe.calibration import Calibration, Data, batches_for
from slimtensors.recipe.modifiers import resolve_ignore
from slimtensors.recipe.oneshot import check_quantizable, plan_quantization
from slimtensors.storage import INDEX, SINGLE, StrPath, check_separate, locate, note_parameters
from slimtensors.tensor import Json
from slimtensors.transformers.auto import find_model_class
from slimtensors.transformers.oneshot import show_progress
from slimtensors.transformers.saving import explain_stock_failure, find_unstorable_weights
from slimtensors.transformers.weights import (
    check_names,
    collect_dense_weights,
    collect_weights,
    encode_quantized,
)

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
    coded: bool = False,
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
        coded: whether to entropy-code the tensors of `compressed-tensors`, as in `quantize_folder`.
        how: shard size, threads and other options, as for `quantize_folder`.

    Example:
        >>> from slimtensors.quantization import QuantizationConfig
        >>> config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        >>> calibrate_folder("my-model", "my-w4a16", config, "text.txt")
    """
    options = how or FolderOptions()
    if coded and dialect == SLIM:
        raise ConfigError(f"coded requires the dialect {COMPRESSED_TENSORS}; {SLIM} is coded")
    settings = calibration or Calibration()
    if settings.evaluate is not None:
        raise ConfigError("calibrate_folder does not support Calibration.evaluate; use oneshot")
    targets = [target] if settings.work is None else [target, settings.work]
    for to in targets:
        check_separate(locate(to, storage_options=options.storage_options), [source])
    data = Data.of(dataset)  # raises for missing data before the model is loaded
    model, tokenizer = _load(source, dtype)
    with open_archive(source, options.storage_options) as archive:
        location, stored_dtype = archive.location, main_dtype(archive)
    if dtype is not None:
        config = _set_scale_dtype(config, stored_dtype)
    fitted = fit_config(model, replace(config, ignore=resolve_ignore(model, config.ignore)))
    config = fitted.config
    check_quantizable(model, config)
    if dialect != SLIM:
        _check_storable(source, model, config)
    batches, notes = batches_for(model, data, settings, tokenizer=tokenizer)
    for note in notes:
        _LOG.warning("%s: %s", source, note)
    with show_progress() as start:
        quantize_model(
            model,
            config,
            calibration=batches,
            method=method,
            folder=settings.work,
            progress=start(method),
        )
    section: Json = {}
    preset = presets.lossless if coded or dialect == SLIM else presets.dense
    if dialect == SLIM:
        stored_dtype = read_dtype(read_config(location)) or stored_dtype
        dense = [_cast(x, dtype, stored_dtype) for x in collect_dense_weights(model)]
        sources, unencoded = encode_quantized(model, dense)
    else:
        state = ModelCompressor(quantization_config=config).compress(model)
        section = model.config.quantization_config
        sources = collect_weights(model, state, save_original_format=True)
        for note in explain_stock_failure(model, sources, config):
            _LOG.warning("%s: %s", source, note)
        sources = [_cast(x, dtype, stored_dtype) for x in sources]
        unencoded = []
    check_names(model, sources)

    def put(folder: Path) -> Summary:
        path = folder if options.max_shard_size is not None else folder / SINGLE
        # The dialect slim stores the parts of compressed-tensors as plain tensors or blobs.
        summary = write(ArchiveSource(sources), path, options.with_preset(preset)).summary()
        if unencoded:
            names = shorten_list(sorted(unencoded))
            _LOG.warning("%s: rounded, but stored without quantization: %s", source, names)
        if dialect == SLIM:
            note_parameters(folder / INDEX, summary.items)
        return summary

    def edit(config: Json, summary: Summary) -> Json:
        if dialect == SLIM:
            return describe_codes(config, summary, stored_dtype)
        quantized = replace_sections(config, section)
        return describe_coded(quantized, summary) if coded else quantized

    quantization = replace(_summarize(model, config), group_sizes=fitted.smaller)
    files = {QUANTIZATION_REPORT: quantization.to_json()}
    summary = replace_weights(
        location, target, put, edit, sources=[source], options=options, files=files
    )
    return replace(summary, quantization=quantization)


def _summarize(model: nn.Module, config: QuantizationConfig) -> QuantizationSummary:
    """Return how much of a model is quantized, and which linear layers stay dense."""
    total = sum(x.numel() for x in model.parameters())
    dense: list[DenseLayer] = []
    layers = quantized = 0
    for name, module in model.named_modules():
        classes = list_class_names(module)
        if not {"Linear", "Conv1D"} & set(classes):
            continue
        layers += 1
        items = sum(getattr(module, x.parameter).numel() for x in list_weights(module))
        if get_quantization(module) is not None:
            quantized += items
        else:
            reason = IGNORED if matches_any(config.ignore, name, classes) else NOT_TARGETED
            dense.append(DenseLayer(name, reason, items))
    return QuantizationSummary(layers, total, quantized, dense)


def _check_storable(source: StrPath, model: nn.Module, config: QuantizationConfig) -> None:
    """Raise if the dialect compressed-tensors cannot store the result."""
    if unstorable := find_unstorable_weights(model, plan_quantization(model, config)):
        raise ConfigError(
            f"{source}: {describe_unstorable(unstorable)}; use the dialect slim, or ignore them"
        )


def _cast(source: TensorSource, dtype: torch.dtype | None, stored: torch.dtype) -> TensorSource:
    """Return a source with tensors of `dtype` in the dtype of the original folder."""
    if source.spec.dtype is not dtype:
        return source

    def read(each: Each) -> Tensor:
        x = source.read(each)
        assert isinstance(x, Tensor), "weights of a model are tensors"
        return x.to(stored)

    return replace(source, spec=replace(source.spec, dtype=stored), read=read)


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
