"""The interface of compressed-tensors and SparseML: save_compressed, ModelCompressor, *Config."""

from typing import TYPE_CHECKING, Any

from slimtensors.compat.sparse_formats import (
    load_compressed,
    save_compressed,
    save_compressed_model,
)
from slimtensors.folder.config_json import BitmaskConfig, Sparse24BitmaskConfig, SparsityConfig

Sparse24BitMaskConfig = Sparse24BitmaskConfig
"""The spelling of compressed-tensors."""
SparsityCompressionConfig = SparsityConfig
"""The name in compressed-tensors."""

if TYPE_CHECKING:
    from slimtensors.compat.compressor import ModelCompressor

__all__ = [
    "BitmaskConfig",
    "ModelCompressor",
    "Sparse24BitMaskConfig",
    "Sparse24BitmaskConfig",
    "SparsityCompressionConfig",
    "SparsityConfig",
    "load_compressed",
    "save_compressed",
    "save_compressed_model",
]


def __getattr__(name: str) -> Any:
    """Import `ModelCompressor` on first use: it needs all of quantization."""
    if name == "ModelCompressor":
        from slimtensors.compat.compressor import ModelCompressor

        return ModelCompressor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
