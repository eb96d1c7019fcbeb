"""Archives: named tensors in a file or folder."""

from slimtensors.archive.read import Archive, Progress, inspect, load, open
from slimtensors.archive.verify import Verification, verify
from slimtensors.archive.write import estimate, save

__all__ = [
    "Archive",
    "Progress",
    "Verification",
    "estimate",
    "inspect",
    "load",
    "open",
    "save",
    "verify",
]
