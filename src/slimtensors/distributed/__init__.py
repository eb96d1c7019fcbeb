"""Small checkpoints for `torch.distributed.checkpoint`: FSDP2, tensor parallel, any world size."""

from slimtensors.distributed.folders import consolidate, distribute
from slimtensors.distributed.inspection import inspect, verify
from slimtensors.distributed.reader import StorageReader
from slimtensors.distributed.stream import SlimStream, stream_registry
from slimtensors.distributed.writer import StorageWriter

__all__ = [
    "SlimStream",
    "StorageReader",
    "StorageWriter",
    "consolidate",
    "distribute",
    "inspect",
    "stream_registry",
    "verify",
]
