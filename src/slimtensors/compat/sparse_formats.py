"""Read and write the sparse formats of compressed-tensors."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.archive import save
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary
from slimtensors.errors import ConfigError, suggest
from slimtensors.folder.config_json import SparsityConfig
from slimtensors.storage import StrPath

_PRESET_BY_FORMAT = {
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
    """Write tensors in a sparse format of compressed-tensors, without loss.

    Each tensor that gets smaller is compressed to values, bit mask, shape and row offsets; the
    summary lists the others. An existing file is replaced when the new one is complete.

    Args:
        tensors: tensors by name.
        save_path: file to write; a folder or URL as for `slimtensors.save`.
        compression_format: `sparse-bitmask`, `sparse-24-bitmask` or `dense`.
        max_shard_size: maximum size of a file, such as `5GB`; several files form a folder.
        threads: number of threads; by default one per core.

    Example:
        >>> import torch
        >>> from slimtensors import load_compressed, save_compressed
        >>> summary = save_compressed({"weight": torch.eye(256)}, "model.safetensors")
        >>> dict(load_compressed("model.safetensors"))["weight"].shape
        torch.Size([256, 256])
    """
    return save(
        tensors,
        save_path,
        preset=find_preset(compression_format),
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
    """Yield the names and decompressed tensors of a file or folder.

    Args:
        compressed_tensors: file, folder or URL.
        compression_config: ignored, because files describe themselves; an unknown format in it
            raises `ConfigError`.
        device: device of the tensors.
        threads: number of threads; by default one per core.
        storage_options: options of fsspec for a URL.
    """
    if compression_config is not None:
        find_preset(compression_config.format)
    archive = open_archive(compressed_tensors, storage_options)
    return archive.items(device=device, threads=threads)


def save_compressed_model(
    model: nn.Module,
    filename: StrPath,
    compression_format: str = "sparse-bitmask",
    *,
    max_shard_size: int | str | None = None,
    threads: int | None = None,
) -> Summary:
    """Write the weights of a model in a sparse format of compressed-tensors, without loss.

    Tied weights are stored once, and `load_compressed` yields them tied. The other arguments are
    those of `save_compressed`.
    """
    return save_compressed(
        model.state_dict(keep_vars=True),
        filename,
        compression_format,
        max_shard_size=max_shard_size,
        threads=threads,
    )


def find_preset(name: str) -> str:
    """Return the preset for a format of compressed-tensors; raise if there is none."""
    known = name.replace("_", "-")
    if known not in _PRESET_BY_FORMAT:
        raise ConfigError(
            f"unknown compression format {name!r}; {suggest(known, _PRESET_BY_FORMAT)}"
        )
    return _PRESET_BY_FORMAT[known]
