"""Compressed folders in vLLM: a plug-in that streams them in as dense weights.

vLLM calls `register` in each of its processes, because our package names it under the entry point
`vllm.general_plugins`. Then `--load-format slimtensors` loads such folders.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimtensors.archive import Archive
from slimtensors.errors import MismatchError

METHOD = "slimtensors"


def register() -> None:
    """Tell vLLM about our loader and our `quant_method`; once or several times."""
    from vllm.model_executor.layers.fused_moe import FusedMoE
    from vllm.model_executor.layers.fused_moe.layer import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    if METHOD in QUANTIZATION_METHODS:
        return

    @register_model_loader(METHOD)
    class SlimLoader(BaseModelLoader):
        """Decodes a folder tensor by tensor, as the model takes them."""

        def download_model(self, model_config: Any) -> None:
            local_folder(model_config, self.load_config)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            stream_into(model, local_folder(model_config, self.load_config))

    @register_quantization_config(METHOD)
    class SlimMethod(QuantizationConfig):
        """Says that layers are ordinary ones: what is compressed is only the folder."""

        @classmethod
        def get_name(cls) -> str:
            return METHOD

        @classmethod
        def get_supported_act_dtypes(cls) -> list[torch.dtype]:
            return [torch.bfloat16, torch.float16, torch.float32]

        @classmethod
        def get_min_capability(cls) -> int:
            return -1

        @staticmethod
        def get_config_filenames() -> list[str]:
            return []

        @classmethod
        def from_config(cls, config: dict[str, Any]) -> "SlimMethod":
            return cls()

        def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
            if isinstance(layer, LinearBase):
                return UnquantizedLinearMethod()
            if isinstance(layer, FusedMoE):
                return UnquantizedFusedMoEMethod(layer.moe_config)
            return None


def stream_into(model: Any, folder: Path) -> None:
    """Give a model of vLLM's all tensors of a folder, one after the other."""
    expected = {name for name, _ in model.named_parameters()}
    with Archive(folder) as archive:
        loaded = model.load_weights(archive.items())
    missing = sorted(expected - set(loaded)) if loaded is not None else []
    if missing:
        names = ", ".join(missing[:4])
        raise MismatchError(
            f"{folder}: has no weights for {len(missing)} parameters of"
            f" {type(model).__name__}: {names}; is it whole, and of this model?"
        )


def local_folder(model_config: Any, load_config: Any) -> Path:
    """Return the folder of a model, from the hub if it is not a path."""
    if Path(model_config.model).is_dir():
        return Path(model_config.model)
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            model_config.model,
            revision=model_config.revision,
            cache_dir=load_config.download_dir,
            allow_patterns=["*.safetensors", "*.safetensors.index.json", "*.json"],
        )
    )
