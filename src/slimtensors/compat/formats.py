"""Sparse formats by the names that compressed-tensors gave them."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import Archive, save
from slimtensors.archive.summary import Summary
from slimtensors.errors import ConfigError, nearest
from slimtensors.folder.config_json import SparsityConfig
from slimtensors.storage import StrPath

_PRESETS = {
    "dense": "dense",
    "dense-sparsity": "dense",
    "sparse-bitmask": "bitmask",
    "sparse-24-bitmask": "bitmask24",
}


def save_compressed(
    tensors: Mapping[str, Tensor],
    save_path: StrPath,
    compression_format: str = "sparse-bitmask",
    *,
    max_shard_size: int | str | None = None,
    threads: int | None = None,
) -> Summary:
    """Write tensors in a format of compressed-tensors: values, bit mask, shape and row offsets.

    Every tensor that gets smaller is compressed, whatever its name; the summary lists the others.
    Lossless. An existing file is replaced once the new one is complete.
    """
    return save(
        tensors,
        save_path,
        preset=preset_of(compression_format),
        dialect="compressed-tensors",
        max_shard_size=max_shard_size,
        threads=threads,
    )


def load_compressed(
    compressed_tensors: StrPath,
    compression_config: SparsityConfig | None = None,
    device: torch.device | str = "cpu",
    *,
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of a file or folder with its name, decompressed, on `device`.

    Files describe themselves, so `compression_config` decides nothing; a format in it that does
    not exist raises `ConfigError`.
    """
    if compression_config is not None:
        preset_of(compression_config.format)
    archive = Archive(compressed_tensors, storage_options=storage_options)
    return archive.items(device=device, threads=threads)


def save_compressed_model(
    model: nn.Module,
    filename: StrPath,
    compression_format: str = "sparse-bitmask",
    *,
    max_shard_size: int | str | None = None,
    threads: int | None = None,
) -> Summary:
    """Write the weights of a model in a format of compressed-tensors. Lossless.

    Tied weights are stored once, and `load_compressed` yields them tied.
    """
    return save_compressed(
        model.state_dict(keep_vars=True),
        filename,
        compression_format,
        max_shard_size=max_shard_size,
        threads=threads,
    )


def preset_of(name: str) -> str:
    """Return the preset that a format of compressed-tensors stands for."""
    known = name.replace("_", "-")
    if known not in _PRESETS:
        raise ConfigError(f"unknown compression format {name!r}; {nearest(known, _PRESETS)}")
    return _PRESETS[known]
