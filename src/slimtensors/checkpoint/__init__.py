"""Training checkpoints: small, bit-exact to resume, crash-safe."""

from importlib import import_module
from typing import Any

from slimtensors.checkpoint.loop import Checkpointing, checkpointing
from slimtensors.checkpoint.profiles import PROFILES, Filter, Profile, StateTensorInfo
from slimtensors.checkpoint.run import (
    Point,
    RunVerification,
    find_incomplete,
    find_unreadable,
    is_run,
    list_checkpoints,
    remove_checkpoint,
    repair_run,
    state_file,
    verify_run,
)
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint
from slimtensors.checkpoint.store import Saved, flatten, load_checkpoint, save_checkpoint

# Names of version 0.1.
About = StateTensorInfo
points = list_checkpoints


def __getattr__(name: str) -> Any:
    """Import modules of version 0.1 on first use."""
    if name in ("io", "rng"):
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "PROFILES",
    "About",
    "Checkpointing",
    "Filter",
    "Point",
    "Profile",
    "RunVerification",
    "Saved",
    "StateTensorInfo",
    "build_checkpoint",
    "checkpointing",
    "find_incomplete",
    "find_unreadable",
    "flatten",
    "is_run",
    "list_checkpoints",
    "load_checkpoint",
    "points",
    "remove_checkpoint",
    "repair_run",
    "restore_checkpoint",
    "save_checkpoint",
    "state_file",
    "verify_run",
]
