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
from slimtensors.errors import ConfigError
from slimtensors.folder.config_json import SparsityConfig
from slimtensors.quantization.config import QuantizationConfig
from slimtensors.quantization.state import Report
from slimtensors.quantization.state_dict import (
    decompress_state,
    describe_config,
    export_state,
    restore_model,
)
from slimtensors.storage import StrPath
from slimtensors.tensor import Json, check_storable, to_cpu

__all__ = ["ModelCompressor"]

_LOG = logging.getLogger(__name__)

_CHOOSERS = {"sparse-bitmask": presets.bitmask, "sparse-24-bitmask": presets.bitmask24}
_SPARSITY_KEYS = {"format", "sparsity_structure", "global_sparsity"}
"""Keys of `sparsity_config` that `SparsityConfig` has."""


class ModelCompressor:
    """Convert a model to a state dict of compressed-tensors, and such state dicts back.

    Args:
        quantization_config: config that was applied to the model.
        sparsity_config: sparse format for a model with many zeros; exactly one of both is given.

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
        quantization_config: QuantizationConfig | None = None,
        sparsity_config: SparsityConfig | None = None,
    ) -> None:
        if (quantization_config is None) == (sparsity_config is None):
            raise ConfigError("pass either quantization_config or sparsity_config, not both")
        self.quantization_config = quantization_config
        self.sparsity_config = sparsity_config

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Return the compressor for a model folder, configured by its `config.json`."""
        config = QuantizationConfig.parse_file(Path(folder) / "config.json")
        if config.config_groups or config.kv_cache_scheme is not None:
            return cls(config)
        known = {key: x for key, x in config.sparsity_config.items() if key in _SPARSITY_KEYS}
        return cls(sparsity_config=SparsityConfig.from_dict(known))

    def compress(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the compressed state dict of a model, for `model.save_pretrained(state_dict=…)`.

        A quantized model must be frozen or compressed. If the model has a config of transformers,
        its `quantization_config` is set, which loaders read from `config.json`.
        """
        if self.sparsity_config is not None:
            state, section = _compress_sparse(model, self.sparsity_config)
            _set_section(model, {"quant_method": "compressed-tensors", "sparsity_config": section})
            return state
        assert self.quantization_config is not None, "checked by the constructor"
        state = export_state(model, self.quantization_config)
        _set_section(model, describe_config(model, self.quantization_config).to_dict())
        return state

    def decompress(
        self, source: StrPath | Mapping[str, Tensor], model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Return the dense tensors of a file, a folder, or a compressed state dict.

        Scales of activations are omitted; `restore` keeps them. Pass the model, which may be on
        `meta`, if the config selects layers by class.
        """
        state = _load_state(source)
        if self.quantization_config is None:
            return dict(state)
        return decompress_state(state, self.quantization_config, model)

    def restore(self, model: nn.Module, source: StrPath | Mapping[str, Tensor]) -> Report:
        """Load compressed tensors into a dense model; it is then quantized and frozen."""
        if self.quantization_config is None:
            raise ConfigError(
                "restore requires a quantization_config; for a sparse model use"
                " model.load_state_dict(compressor.decompress(source))"
            )
        return restore_model(model, _load_state(source), self.quantization_config)


def _compress_sparse(model: nn.Module, config: SparsityConfig) -> tuple[dict[str, Tensor], Json]:
    """Return a state dict with sparse weights in parts, and its `sparsity_config`."""
    if config.format not in _CHOOSERS:
        raise ConfigError(f"sparse models support {' and '.join(_CHOOSERS)}, not {config.format}")
    state: dict[str, Tensor] = {}
    zeros = items = 0
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # not saved by transformers
    for name, tensor in model.state_dict().items():
        if name in tied:
            continue
        x = to_cpu(check_storable(name, tensor)).contiguous()
        counts = count_zeros(x)
        zeros, items = zeros + counts.zero, items + counts.items
        codec = _choose_codec(name, x, config.format)
        if codec is None:
            state[name] = tensor
            continue
        parts = compressed_tensors.split(x, codec)
        state |= {f"{name.removesuffix('.weight')}.{part}": y for part, y in parts.items()}
    section = config.to_dict() | {"global_sparsity": zeros / max(items, 1)}
    return state, section | {"targets": [], "ignore": [], "registry_requires_subclass": False}


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
    return source if isinstance(source, Mapping) else load(source)


def _set_section(model: nn.Module, section: Json) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_file"):
        config.quantization_config = json.loads(json.dumps(section))
