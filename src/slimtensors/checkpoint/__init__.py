"""Training checkpoints: small, exact to resume, safe."""

from slimtensors.checkpoint import io, rng
from slimtensors.checkpoint.filters import Filter
from slimtensors.checkpoint.io import Saved, flatten, load_checkpoint, save_checkpoint
from slimtensors.checkpoint.loop import Checkpointing, checkpointing
from slimtensors.checkpoint.profiles import PROFILES, Profile
from slimtensors.checkpoint.roles import About
from slimtensors.checkpoint.run import (
    Point,
    RunVerification,
    is_run,
    points,
    remove_checkpoint,
    repair_run,
    state_file,
    verify_run,
)
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint

__all__ = [
    "PROFILES",
    "About",
    "Checkpointing",
    "Filter",
    "Point",
    "Profile",
    "RunVerification",
    "Saved",
    "build_checkpoint",
    "checkpointing",
    "flatten",
    "io",
    "is_run",
    "load_checkpoint",
    "points",
    "remove_checkpoint",
    "repair_run",
    "restore_checkpoint",
    "rng",
    "save_checkpoint",
    "state_file",
    "verify_run",
]
