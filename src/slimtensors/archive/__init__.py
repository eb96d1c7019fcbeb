"""Archives: named tensors in a file or folder."""

from slimtensors.archive.read import Archive, Progress, load
from slimtensors.archive.read import inspect as inspect  # public, but not for `import *`
from slimtensors.archive.read import open as open
from slimtensors.archive.verify import Verification, verify
from slimtensors.archive.write import estimate, save

__all__ = [
    "Archive",
    "Progress",
    "Verification",
    "estimate",
    "load",
    "save",
    "verify",
]
