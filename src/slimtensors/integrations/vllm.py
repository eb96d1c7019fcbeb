"""vLLM plug-in that loads compressed folders as dense weights.

vLLM calls `register`, the entry point `vllm.general_plugins` of this package, in each of its
processes. `--load-format slimtensors` then loads compressed folders.
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
"""Name of the loader and of the `quant_method`."""

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


def find_expert_classes() -> tuple[type, Any] | None:
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
    experts = find_expert_classes()

    class SlimLoader(BaseModelLoader):
        """Decode a folder tensor by tensor while the model loads them."""

        def download_model(self, model_config: Any) -> None:
            find_folder(model_config, self.load_config)

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            load_folder(model, find_folder(model_config, self.load_config))

    class SlimMethod(QuantizationConfig):
        """Use ordinary layers: only the folder is compressed."""

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


def load_folder(model: Any, folder: Path) -> None:
    """Load all tensors of a folder into a model of vLLM, one after the other."""
    expected = {name for name, _ in model.named_parameters()}
    with Archive(folder) as archive:
        loaded = model.load_weights(archive.items())
    missing = sorted(expected - set(loaded)) if loaded is not None else []
    if missing:
        names = ", ".join(missing[:4])
        raise MismatchError(
            f"{folder}: no weights for {len(missing)} parameters of {type(model).__name__}:"
            f" {names}; the folder is incomplete or belongs to another model"
        )


def find_folder(model_config: Any, load_config: Any) -> Path:
    """Return the folder of a model; download it from the hub if it is not a path."""
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
