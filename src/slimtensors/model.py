"""Whole models."""

from torch import nn

from slimtensors.container import StrPath
from slimtensors.formats import save_compressed
from slimtensors.summary import Summary


def save_compressed_model(
    model: nn.Module,
    filename: StrPath,
    compression_format: str = "sparse-bitmask",
    *,
    max_shard_size: int | str | None = None,
    threads: int | None = None,
) -> Summary:
    """Write the weights of a model in a format of compressed-tensors. Lossless.

    Weights that are tied are stored once, and `load_compressed` yields them tied.
    """
    return save_compressed(
        model.state_dict(keep_vars=True),
        filename,
        compression_format,
        max_shard_size=max_shard_size,
        threads=threads,
    )
