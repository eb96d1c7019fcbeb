"""Whole models in the names and bytes of compressed-tensors: quantized or sparse, and back."""

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

_LOG = logging.getLogger(__name__)
_CHOOSERS = {"sparse-bitmask": presets.bitmask, "sparse-24-bitmask": presets.bitmask24}


def sparse_state(model: nn.Module, config: SparsityConfig) -> tuple[dict[str, Tensor], Json]:
    """Return weights in parts and all else as it is; and the section that describes them."""
    if config.format not in _CHOOSERS:
        raise ConfigError(
            f"sparse models are stored as {' or '.join(_CHOOSERS)}, not {config.format}"
        )
    state: dict[str, Tensor] = {}
    zeros = items = 0
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # which transformers does not save
    for name, given in model.state_dict().items():
        if name in tied:
            continue
        x = to_cpu(check_storable(name, given)).contiguous()
        found = count_zeros(x)
        zeros, items = zeros + found.zero, items + found.items
        codec = _codec(name, x, config.format)
        if codec is None:
            state[name] = given
            continue
        parts = compressed_tensors.split(x, codec)
        state |= {f"{name.removesuffix('.weight')}.{part}": y for part, y in parts.items()}
    section = config.to_dict() | {"global_sparsity": zeros / max(items, 1)}
    return state, section | {"targets": [], "ignore": [], "registry_requires_subclass": False}


def _codec(name: str, x: Tensor, stored: str) -> Bitmask | Bitmask24 | None:
    choice = _CHOOSERS[stored](name, x)
    if choice.plan is None:
        return None
    if not name.endswith(".weight"):
        _LOG.warning("%s: stays dense, because %s has a place for weights only", name, stored)
        return None
    assert isinstance(choice.plan, Plan)
    codec = choice.plan.codec
    assert isinstance(codec, Bitmask | Bitmask24), "the rules for these formats choose no other"
    return codec


__all__ = ["ModelCompressor"]


class ModelCompressor:
    """Turns a model into tensors as compressed-tensors stores them, and such tensors back.

    One of both configs says how: a quantization config that was applied to the model, or a sparsity
    config for a model with many zeros.
    """

    def __init__(
        self,
        quantization_config: QuantizationConfig | None = None,
        sparsity_config: SparsityConfig | None = None,
    ) -> None:
        if (quantization_config is None) == (sparsity_config is None):
            raise ConfigError("give a quantization_config or a sparsity_config, not both")
        self.quantization_config = quantization_config
        self.sparsity_config = sparsity_config

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> Self:
        """Read how a model folder is compressed from its `config.json`."""
        config = QuantizationConfig.parse_file(Path(folder) / "config.json")
        if config.config_groups or config.kv_cache_scheme is not None:
            return cls(config)
        known = {key: x for key, x in config.sparsity_config.items() if key in _SPARSITY}
        return cls(sparsity_config=SparsityConfig.from_dict(known))

    def compress(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the compressed state dict of a model, for `model.save_pretrained(state_dict=…)`.

        A quantized model must be frozen or compressed. If the model has a config, as those of
        transformers do, it gets the `quantization_config` that loaders look for in `config.json`.
        """
        if self.sparsity_config is not None:
            state, zeros = sparse_state(model, self.sparsity_config)
            _describe(model, {"quant_method": "compressed-tensors", "sparsity_config": zeros})
            return state
        assert self.quantization_config is not None, "there is one or the other"
        state = export_state(model, self.quantization_config)
        _describe(model, describe_config(model, self.quantization_config).to_dict())
        return state

    def decompress(
        self, source: StrPath | Mapping[str, Tensor], model: nn.Module | None = None
    ) -> dict[str, Tensor]:
        """Return the dense tensors of a file, a folder, or a compressed state dict.

        Scales of activations are left out; `restore` keeps them. The model, which may be on `meta`,
        is needed where only its classes tell how a layer is stored.
        """
        state = _state(source)
        if self.quantization_config is None:
            return dict(state)
        return decompress_state(state, self.quantization_config, model)

    def restore(self, model: nn.Module, source: StrPath | Mapping[str, Tensor]) -> Report:
        """Load compressed tensors into a dense model, which then is frozen: quantized and runs."""
        if self.quantization_config is None:
            raise ConfigError(
                "a sparse model is not quantized: model.load_state_dict(decompress(…))"
            )
        return restore_model(model, _state(source), self.quantization_config)


_SPARSITY = {"format", "sparsity_structure", "global_sparsity"}


def _state(source: StrPath | Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return source if isinstance(source, Mapping) else load(source)


def _describe(model: nn.Module, section: Json) -> None:
    config: Any = getattr(model, "config", None)
    if hasattr(config, "to_json_file"):
        config.quantization_config = json.loads(json.dumps(section))
