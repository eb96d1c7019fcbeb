"""Store PyTorch models and training checkpoints compactly, in plain safetensors files."""

from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from slimtensors import _moved

if TYPE_CHECKING:
    from slimtensors.archive import Archive, load, save
    from slimtensors.archive import inspect as inspect  # public, but not for `import *`
    from slimtensors.archive import open as open
    from slimtensors.archive.bases import using_base
    from slimtensors.archive.decompress import decompress
    from slimtensors.archive.delta import diff, restore
    from slimtensors.archive.summary import Summary
    from slimtensors.archive.verify import Verification, verify
    from slimtensors.codecs import Bitmask, Bitmask24, Dense, Density, Gaps, Huffman, Int
    from slimtensors.codecs.plan import Plan, chain
    from slimtensors.compat import (
        BitmaskConfig,
        ModelCompressor,
        Sparse24BitmaskConfig,
        SparsityConfig,
        load_compressed,
        save_compressed,
        save_compressed_model,
    )

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
    "decompress",
    "diff",
    "load",
    "load_compressed",
    "restore",
    "save",
    "save_compressed",
    "save_compressed_model",
    "using_base",
    "verify",
]

_HOMES = {
    "archive": ("Archive", "Verification", "inspect", "load", "open", "save", "verify"),
    "archive.bases": ("using_base",),
    "archive.decompress": ("decompress",),
    "archive.delta": ("diff", "restore"),
    "archive.summary": ("Summary",),
    "codecs": ("Bitmask", "Bitmask24", "Dense", "Density", "Gaps", "Huffman", "Int"),
    "codecs.plan": ("Plan", "chain"),
    "compat": (
        "BitmaskConfig",
        "ModelCompressor",
        "Sparse24BitmaskConfig",
        "SparsityConfig",
        "load_compressed",
        "save_compressed",
        "save_compressed_model",
    ),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

_moved.install()


def __getattr__(name: str) -> Any:
    """Import public names and subpackages on first use: torch alone takes a second."""
    if name in _HOME_OF:
        value = getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
        globals()[name] = value
        return value
    if not name.startswith("_") and find_spec(f"{__name__}.{name}") is not None:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME_OF})
