"""Small checkpoints for `torch.distributed.checkpoint`: FSDP2, tensor parallel, any world size."""

from slimtensors.distributed.reader import StorageReader
from slimtensors.distributed.writer import StorageWriter

__all__ = ["StorageReader", "StorageWriter"]
