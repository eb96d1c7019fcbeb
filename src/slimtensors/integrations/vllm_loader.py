"""The classes that extend vLLM; imported only in its processes.

Classes are at module level because vLLM pickles them for its workers.
"""

from collections.abc import Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization import (
    QUANTIZATION_METHODS,
    get_quantization_config,
    register_quantization_config,
)
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.model_loader import DefaultModelLoader, register_model_loader

from slimtensors.folder.config_json import METHOD
from slimtensors.integrations.vllm import has_sparse_parts, restore_section
from slimtensors.integrations.vllm_stream import Folder, count_ranks, decode_weights
from slimtensors.tensor import Json

FORMATS = ("auto", "hf", "safetensors")
"""Values of `--load-format` for which vLLM reads safetensors files with its default loader."""
BASE = "base"
"""Key of `--model-loader-extra-config`: the base of a delta."""


def register_classes() -> None:
    """Register the classes of this module with vLLM, unless done before."""
    if METHOD in QUANTIZATION_METHODS:
        return
    for name in (METHOD, *FORMATS):
        register_model_loader(name)(SlimLoader)
    register_quantization_config(METHOD)(SlimMethod)


class SlimLoader(DefaultModelLoader):
    """Decode compressed tensors in the stream of vLLM's loader."""

    def __init__(self, load_config: Any) -> None:
        if load_config.load_format == METHOD:
            load_config = replace(load_config, load_format="auto")
        options = load_config.model_loader_extra_config
        self._base: str | None = None
        if isinstance(options, dict) and BASE in options:
            self._base = str(options[BASE])
            others = {key: value for key, value in options.items() if key != BASE}
            load_config = replace(load_config, model_loader_extra_config=others)
        super().__init__(load_config)

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Load all weights; check that none is missing as if the folder were dense."""
        if model_config.quantization == METHOD:
            model_config = copy(model_config)
            model_config.quantization = None
        super().load_weights(model, model_config)

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights of a model, decoded."""
        folder = Folder(model_config.model, lambda: self._find_path(model_config), self._base)
        sparse = has_sparse_parts(model_config.hf_config)
        weights = super().get_all_weights(model_config, model)
        yield from decode_weights(weights, folder, sparse=sparse, partial=count_ranks() > 1)

    def _find_path(self, model_config: Any) -> Path | None:
        """Return the folder of a model, in the cache of the hub if it is not a local one."""
        if Path(model_config.model).is_dir():
            return Path(model_config.model)
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError

        try:
            found = snapshot_download(
                model_config.model,
                revision=model_config.revision,
                cache_dir=self.load_config.download_dir,
                local_files_only=True,
            )
        except (LocalEntryNotFoundError, ValueError):  # another source, such as ModelScope
            return None
        return Path(found)


def _find_method(section: Json, user_quant: str | None, hf_config: Any) -> str | None:
    """Return the method that vLLM chooses for a section; None if the user asked for another."""
    for name in QUANTIZATION_METHODS:
        if name == METHOD:
            continue
        override = get_quantization_config(name).override_quantization_method
        if (found := override(section, user_quant, hf_config=hf_config)) is not None:
            return str(found)
    method = str(section["quant_method"])
    return method if user_quant in (None, METHOD, method) else None


class SlimMethod(QuantizationConfig):
    """Use ordinary layers, or those from before compression: only the folder is compressed."""

    @classmethod
    def get_name(cls) -> str:
        """Return the `quant_method` in `config.json`."""
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        """Return all dtypes that vLLM computes in."""
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Return a number below that of every GPU."""
        return -1

    @staticmethod
    def get_config_filenames() -> list[str]:
        """Return no file besides `config.json`."""
        return []

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: Any, user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        """Replace our section by the one from before compression; return the method for that."""
        before = restore_section(hf_quant_cfg)
        if before is None:
            return None
        if not before and user_quant in (None, METHOD):
            return METHOD
        hf_quant_cfg.clear()
        hf_quant_cfg.update(before)
        for config in (hf_config, getattr(hf_config, "text_config", None)):  # a copy, or equal
            if config is None or getattr(config, "quantization_config", None) is None:
                continue
            if before:
                config.quantization_config = dict(before)
            else:
                del config.quantization_config
        # What was dense may be quantized while it is loaded, as by `--quantization fp8`.
        return _find_method(before, user_quant, hf_config) if before else user_quant

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "SlimMethod":
        """Return the method; our section has no options for layers."""
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Return the method of dense layers; None where that is the default."""
        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
