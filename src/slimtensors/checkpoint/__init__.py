"""Training checkpoints: small, exact to resume, safe."""

from slimtensors.checkpoint import io
from slimtensors.checkpoint.filters import Filter
from slimtensors.checkpoint.io import Saved, load_checkpoint, save_checkpoint
from slimtensors.checkpoint.roles import About
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint

__all__ = [
    "About",
    "Filter",
    "Saved",
    "build_checkpoint",
    "io",
    "load_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
]
