"""Compressed folders in vLLM: a plug-in that streams them in as dense weights.

vLLM calls `register` in each of its processes, because our package names it under the entry point
`vllm.general_plugins`. Then `--load-format slimtensors` loads such folders.
"""

import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from slimtensors.archive import Archive
from slimtensors.errors import MismatchError

METHOD = "slimtensors"

log = logging.getLogger(__name__)


def register() -> None:
    """Register our loader and our `quant_method`; log a warning if this vLLM does not allow it.

    Never raises: after an exception in a plug-in, vLLM starts no model, dense ones included.
    """
    try:
        register_classes()
    except Exception as error:  # vLLM guarantees no interface: anything may be missing or differ
        warn_once(vllm_version(), " ".join(f"{type(error).__name__}: {error}".split()))


@cache
def warn_once(version: str, reason: str) -> None:
    """Log that the plug-in is off, once per process and reason."""
    log.warning("slimtensors is disabled in vLLM %s (%s)", version, reason)


def vllm_version() -> str:
    """Return the version of the installed vLLM, or "(unknown version)"."""
    try:
        import vllm

        return str(vllm.__version__)
    except Exception:  # called while an error is handled, which must not be replaced
        return "(unknown version)"


def experts_classes() -> tuple[type, Any] | None:
    """Return the class of expert layers and its dense method, or None if vLLM has no such names.

    Versions without these names use dense experts where `get_quant_method` returns None.
    """
    try:
        from vllm.model_executor.layers.fused_moe import FusedMoE
        from vllm.model_executor.layers.fused_moe.layer import UnquantizedFusedMoEMethod
    except ImportError:
        return None
    # Functions took the place of classes in some versions.
    return (FusedMoE, UnquantizedFusedMoEMethod) if isinstance(FusedMoE, type) else None


def register_classes() -> None:
    """Register with vLLM, unless done before."""
    from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
    from vllm.model_executor.model_loader import BaseModelLoader, register_model_loader

    if METHOD in QUANTIZATION_METHODS:
        return
    experts = experts_classes()

    class SlimLoader(BaseModelLoader):
        """Decodes a folder tensor by tensor, as the model takes them."""

        def download_model(self, model_config: Any) -> None:
            local_folder(model_config, self.load_config)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            stream_into(model, local_folder(model_config, self.load_config))

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
            if experts is not None and isinstance(layer, experts[0]):
                return experts[1](layer.moe_config)
            return None

    register_model_loader(METHOD)(SlimLoader)
    register_quantization_config(METHOD)(SlimMethod)


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
