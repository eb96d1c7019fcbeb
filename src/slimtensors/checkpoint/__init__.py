"""Training checkpoints: small, exact to resume, safe."""

from slimtensors.checkpoint.loop import Checkpointing, checkpointing
from slimtensors.checkpoint.policy import PROFILES, Filter, Profile, RoleInfo
from slimtensors.checkpoint.run import (
    Point,
    RunVerification,
    find_unreadable,
    is_run,
    points,
    remove_checkpoint,
    repair_run,
    state_file,
    verify_run,
)
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint
from slimtensors.checkpoint.store import Saved, flatten, load_checkpoint, save_checkpoint

About = RoleInfo  # its name in version 0.1

__all__ = [
    "PROFILES",
    "About",
    "Checkpointing",
    "Filter",
    "Point",
    "Profile",
    "RoleInfo",
    "RunVerification",
    "Saved",
    "build_checkpoint",
    "checkpointing",
    "find_unreadable",
    "flatten",
    "is_run",
    "load_checkpoint",
    "points",
    "remove_checkpoint",
    "repair_run",
    "restore_checkpoint",
    "save_checkpoint",
    "state_file",
    "verify_run",
]
