"""Keep PyTorch models and checkpoints small on disk, in plain safetensors files."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import slimtensors_command.as_module  # noqa: F401  before torch is imported
from slimtensors.archive import Archive, Verification, inspect, load, open, save, verify
from slimtensors.codecs import Bitmask, Bitmask24, Dense, Density, Gaps, Huffman, Int
from slimtensors.delta import diff, restore
from slimtensors.formats import load_compressed, save_compressed
from slimtensors.model import save_compressed_model
from slimtensors.plan import Plan, chain
from slimtensors.sparsity import BitmaskConfig, Sparse24BitmaskConfig, SparsityConfig
from slimtensors.summary import Summary

if TYPE_CHECKING:
    from slimtensors.compressor import ModelCompressor

__version__ = version("slimtensors")

__all__ = [
    "Archive",
    "Bitmask",
    "Bitmask24",
    "BitmaskConfig",
    "Dense",
    "Density",
    "Gaps",
    "Huffman",
    "Int",
    "ModelCompressor",
    "Plan",
    "Sparse24BitmaskConfig",
    "SparsityConfig",
    "Summary",
    "Verification",
    "chain",
    "diff",
    "inspect",
    "load",
    "load_compressed",
    "open",
    "restore",
    "save",
    "save_compressed",
    "save_compressed_model",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import `ModelCompressor` when somebody asks for it: it brings all of quantization along."""
    if name != "ModelCompressor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from slimtensors.compressor import ModelCompressor

    return ModelCompressor


def __dir__() -> list[str]:
    return [*globals(), "ModelCompressor"]
