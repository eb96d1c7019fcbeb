"""Compact checkpoints for `torch.distributed.checkpoint`: FSDP2, tensor parallel, any layout."""

from slimtensors.checkpoint.distributed.folders import consolidate, distribute, verify
from slimtensors.checkpoint.distributed.folders import inspect as inspect  # not for `import *`
from slimtensors.checkpoint.distributed.reader import StorageReader
from slimtensors.checkpoint.distributed.writer import StorageWriter

__all__ = [
    "StorageReader",
    "StorageWriter",
    "consolidate",
    "distribute",
    "verify",
]
