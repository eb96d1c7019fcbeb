"""`ModelCompressor` of compressed-tensors: models to compressed state dicts and back."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from torch import Tensor, nn

from slimtensors.archive import load
from slimtensors.archive.dialects import compressed_tensors
from slimtensors.codecs import Bitmask, Bitmask24, presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.statistics import count_zeros
from slimtensors.compat.model_state import (
    decompress_layers,
    describe_quantization,
    load_weights,
    match_targets,
)
from slimtensors.compat.sparse_formats import find_preset
from slimtensors.errors import ConfigError, report_malformed
from slimtensors.folder.config_json import (
    COMPRESSED_TENSORS,
    CONFIG,
    SparsityConfig,
    parse_sparsity,
    read_config,
    read_quantization,
    read_sparsity_section,
    rename_methods,
    set_section,
    to_json_text,
)
from slimtensors.quantization.apply import compress_quantized_weights
from slimtensors.quantization.config import LAYOUT, QuantizationConfig
from slimtensors.quantization.fused import warn_unshared
from slimtensors.quantization.state import Report
from slimtensors.quantization.state_dict import (
    decompress_state,
    describe_config,
    export_state,
    restore_model,
)
from slimtensors.runtime.convert import dequantize_
from slimtensors.storage import StrPath, write_file_atomically
from slimtensors.tensor import Json, check_storable, parse_shape, to_cpu

__all__ = ["ModelCompressor"]

_LOG = logging.getLogger(__name__)

_CHOOSERS = {"sparse-bitmask": presets.bitmask, "sparse-24-bitmask": presets.bitmask24}


class ModelCompressor:
    """Convert a model to a state dict of compressed-tensors, and such state dicts back.

    With both configs, the weights are quantized, and their codes stored sparse.

    Args:
        sparsity_config: sparse format for a model with many zeros.
        quantization_config: config that was applied to the model; also accepted as the only
            positional argument.

    Example:
        >>> from slimtensors import ModelCompressor
        >>> from slimtensors.quantization import QuantizationConfig, quantize_model
        >>> config = QuantizationConfig.preset("W8A16", ignore=["lm_head"])
        >>> quantize_model(model, config, method="rtn")
        >>> state = ModelCompressor(config).compress(model)
        >>> model.save_pretrained("my-w8a16", state_dict=state)
        >>> dense = ModelCompressor.from_pretrained("my-w8a16").decompress("my-w8a16")
    """

    def __init__(
        self,
        sparsity_config: SparsityConfig | QuantizationConfig | None = None,
        quantization_config: QuantizationConfig | None = None,
    ) -> None:
        if isinstance(sparsity_config, QuantizationConfig):
            if quantization_config is not None:
                raise ConfigError("sparsity_config: expected a SparsityConfig")
            sparsity_config, quantization_config = None, sparsity_config
        if quantization_config is None and sparsity_config is None:
            raise ConfigError("pass a quantization_config, a sparsity_config or both")
        self.quantization_config = quantization_config
        self.sparsity_config = sparsity_config
        self._section: Json | None = None  # of the model compressed last

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: StrPath) -> Self | None:
        """Return the compressor for a local model folder; None if it is not compressed."""
        config = read_config(pretrained_model_name_or_path)
        if not config:
            raise ConfigError(f"{pretrained_model_name_or_path}: {CONFIG} not found")
        sparsity = read_sparsity_section(config)
        return cls._make(parse_sparsity(sparsity) if sparsity else None, read_quantization(config))

    @classmethod
    def from_compression_config(cls, compression_config: Any) -> Self | None:
        """Return the compressor for a section `quantization_config` or `compression_config`.

        Args:
            compression_config: the section as a dict, the `CompressedTensorsConfig` that
                transformers makes from it, or None.
        """
        sparsity = cls.parse_sparsity_config(compression_config)
        section = cls.parse_quantization_config(compression_config)
        quantization = None
        if section is not None:
            named = rename_methods({"quantization_config": section})
            quantization = QuantizationConfig.from_dict(named)
        return cls._make(parse_sparsity(sparsity) if sparsity else None, quantization)

    @classmethod
    def from_pretrained_model(
        cls,
        model: nn.Module,
        sparsity_config_or_format: SparsityConfig | str | None = None,
        quantization_format: str | None = None,
        sparsity_config: SparsityConfig | str | None = None,
    ) -> Self | None:
        """Return the compressor for a model in memory; None if there is nothing to compress.

        Args:
            model: model, to which a quantization config may be attached.
            sparsity_config_or_format: sparse format, as a config or by name.
            quantization_format: format of quantized weights; must be the one chosen when the
                config was applied, which is the default.
            sparsity_config: former name of sparsity_config_or_format.
        """
        sparsity = sparsity_config_or_format or sparsity_config
        if isinstance(sparsity, str):
            find_preset(sparsity)  # raises for an unknown format
            sparsity = parse_sparsity({"format": sparsity})
        quantization = describe_quantization(model)
        if quantization is not None and quantization_format not in (None, quantization.format):
            raise ConfigError(
                f"quantization_format: the model is quantized for {quantization.format}; set the"
                " format in its config before apply_quantization_config"
            )
        return cls._make(sparsity or None, quantization)

    @classmethod
    def _make(
        cls, sparsity: SparsityConfig | None, quantization: QuantizationConfig | None
    ) -> Self | None:
        if quantization is not None and not (
            quantization.config_groups or quantization.kv_cache_scheme is not None
        ):
            quantization = None
        if sparsity is None and quantization is None:
            return None
        return cls(sparsity, quantization)

    @staticmethod
    def parse_sparsity_config(compression_config: Any) -> Json | None:
        """Return the `sparsity_config` inside a section; None if there is none."""
        return _to_dict(compression_config).get("sparsity_config") or None

    @staticmethod
    def parse_quantization_config(compression_config: Any) -> Json | None:
        """Return a section without what is not about quantization; None if nothing is left."""
        dropped = ("sparsity_config", "transform_config", "version")
        section = {k: x for k, x in _to_dict(compression_config).items() if k not in dropped}
        return section if section.keys() - {"quant_method"} else None

    def compress(
        self,
        model: nn.Module,
        state_dict: Mapping[str, Tensor] | None = None,
        show_progress: bool = False,
    ) -> dict[str, Tensor]:
        """Return the compressed state dict of a model, for `model.save_pretrained(state_dict=…)`.

        A quantized model must be frozen or compressed. If the model has a config of transformers,
        its `quantization_config` is set, which loaders read from `config.json`.

        Args:
            model: the model.
            state_dict: weights to compress instead of the model's; not for quantized models.
            show_progress: accepted for scripts of compressed-tensors; there is no progress bar.
        """
        state = state_dict
        section: Json = {"quant_method": COMPRESSED_TENSORS}
        if self.quantization_config is not None:
            if state_dict is not None:
                raise ConfigError("state_dict is not supported with a quantization_config")
            state = export_state(model, self.quantization_config)
            section = describe_config(model, self.quantization_config).to_dict()
            warn_unshared(state, type(model).__name__)
        state = model.state_dict() if state is None else state
        if self.sparsity_config is not None:
            state, section["sparsity_config"] = _compress_sparse(model, state, self.sparsity_config)
        self._section = json.loads(json.dumps(section))
        _set_section(model, self._section)
        return dict(state)

    def decompress(
        self, model_path: StrPath | Mapping[str, Tensor], model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Return the dense tensors of a file, a folder, or a compressed state dict.

        Given a path and a model, which may be on `meta`, the weights are also loaded into the
        model; it is quantized and frozen afterwards if the weights are quantized.

        Scales of activations are omitted in the result. Pass the model if the config selects layers
        by class; it is not changed if the source is a state dict.
        """
        state = _load_state(model_path)
        config = self.quantization_config
        dense = dict(state) if config is None else decompress_state(state, config, model)
        if model is None or isinstance(model_path, Mapping):
            return dense
        load_weights(model, dense)
        attributes: Any = model
        if config is not None:
            restore_model(model, state, config)
            attributes.quantization_config = config
        if self.sparsity_config is not None:
            attributes.sparsity_config = self.sparsity_config
        return dense

    def restore(self, model: nn.Module, source: StrPath | Mapping[str, Tensor]) -> Report:
        """Load compressed tensors into a dense model; it is then quantized and frozen."""
        if self.quantization_config is None:
            raise ConfigError(
                "restore requires a quantization_config; for a sparse model use"
                " model.load_state_dict(compressor.decompress(source))"
            )
        return restore_model(model, _load_state(source), self.quantization_config)

    def compress_model(self, model: nn.Module) -> None:
        """Replace the weights of a quantized, frozen model by their stored form, in place."""
        if self.quantization_config is None:
            raise ConfigError(
                "compress_model requires a quantization_config; for sparse weights use"
                " slimtensors.quantization.quantize_(model, sparse_weight())"
            )
        model.apply(compress_quantized_weights)

    def decompress_model(self, model: nn.Module) -> None:
        """Make all weights of a model dense again, in place; on `meta`, they have no values."""
        decompress_layers(model)
        dequantize_(model)

    def update_config(self, save_directory: StrPath) -> None:
        """Describe the weights in the `config.json` of a folder, which is created if missing.

        After `compress`, the section describes the model that was compressed.
        """
        section = self._section
        if section is None:
            section = {"quant_method": COMPRESSED_TENSORS, "version": LAYOUT}
            if self.quantization_config is not None:
                section = self.quantization_config.to_dict()
            if self.sparsity_config is not None:
                section["sparsity_config"] = _describe_sparse(self.sparsity_config)
        config = set_section(read_config(save_directory), section)
        write_file_atomically(Path(save_directory) / CONFIG, to_json_text(config))


def _compress_sparse(
    model: nn.Module, state: Mapping[str, Tensor], config: SparsityConfig
) -> tuple[dict[str, Tensor], Json]:
    """Return a state dict with sparse weights in parts, and its `sparsity_config`."""
    format = config.format.replace("_", "-")
    if format not in _CHOOSERS:
        raise ConfigError(f"sparse models support {' and '.join(_CHOOSERS)}, not {config.format}")
    is_target = match_targets(model, config)
    compressed: dict[str, Tensor] = {}
    zeros = items = 0
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # not saved by transformers
    for name, tensor in state.items():
        if name in tied:
            continue
        x = to_cpu(check_storable(name, tensor)).contiguous()
        counts = count_zeros(x)
        zeros, items = zeros + counts.zero, items + counts.items
        codec = _choose_codec(name, x, format) if is_target(name) else None
        if codec is None:
            compressed[name] = tensor
            continue
        parts = compressed_tensors.split(x, codec)
        compressed |= {f"{name.removesuffix('.weight')}.{part}": y for part, y in parts.items()}
    return compressed, _describe_sparse(config) | {"global_sparsity": zeros / max(items, 1)}


def _describe_sparse(config: SparsityConfig) -> Json:
    """Return the `sparsity_config` as compressed-tensors 0.14 writes it."""
    always = {"targets": config.targets or [], "ignore": config.ignore or []}
    format = config.format.replace("_", "-")
    return config.to_dict() | always | {"format": format, "registry_requires_subclass": False}


def _choose_codec(name: str, x: Tensor, format: str) -> Bitmask | Bitmask24 | None:
    choice = _CHOOSERS[format](name, x)
    if choice.plan is None:
        return None
    if not name.endswith(".weight"):
        _LOG.warning(
            "%s: stays dense, because %s supports only names ending in .weight", name, format
        )
        return None
    assert isinstance(choice.plan, Plan)
    codec = choice.plan.codec
    assert isinstance(codec, Bitmask | Bitmask24), (
        "the choosers of these formats return no other codec"
    )
    return codec


def _load_state(source: StrPath | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    if not isinstance(source, Mapping):
        return load(source)
    state = dict(source)
    for prefix, name in compressed_tensors.find_prefixes(source.keys()).items():
        parts = {part: state.pop(f"{prefix}.{part}") for part in ("compressed", "bitmask", "shape")}
        state.pop(f"{prefix}.row_offsets", None)
        with report_malformed(name):
            shape = parse_shape(parts["shape"].flatten().tolist())
            state[name] = compressed_tensors.join(
                to_cpu(parts["compressed"]), to_cpu(parts["bitmask"]), shape
            )
    return state


def _to_dict(section: Any) -> Json:
    """Return a section as a dict of JSON values; transformers makes an object of it."""
    if not hasattr(section, "to_dict"):
        return dict(section or {})
    data: Json = json.loads(json.dumps(section.to_dict(), default=lambda value: value.value))
    return data


def _set_section(model: nn.Module, section: Json) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_file"):
        config.quantization_config = dict(section)
