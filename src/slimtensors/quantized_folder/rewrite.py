"""What all that rewrites a model folder needs: options, and what its `config.json` says."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from slimtensors.archive import Archive, Progress
from slimtensors.archive.state import State, as_state
from slimtensors.container import Place, StrPath
from slimtensors.errors import ConfigError
from slimtensors.folder import without_section
from slimtensors.making import How, Weights, job_of, make_folder
from slimtensors.presets import Chooser
from slimtensors.quantization import QuantizationConfig
from slimtensors.ranks import Alone, Ranks
from slimtensors.spec import Json, find_dtype
from slimtensors.summary import Summary

COMPRESSED_TENSORS, SLIM = "compressed-tensors", "slim"


@dataclass(frozen=True)
class Rewrite:
    """How a folder is written anew."""

    max_shard_size: int | str | None = None
    """By default, files are as they were."""
    replace: bool = False
    threads: int | None = None
    progress: Progress | None = None
    storage_options: dict[str, Any] | None = None
    ranks: Ranks | None = None
    """The processes that share the work; by default there is one."""

    def run(
        self,
        archive: Archive,
        where: Place,
        target: StrPath,
        edit: Callable[[Json, Summary], Json],
        *,
        choose: Chooser,
        dialect: str,
        state: Callable[[Archive], State] = as_state,
        stands_for: Json | None = None,
    ) -> Summary:
        """Write what `state` makes of each file of a folder, and its config as `edit` says.

        If `stands_for` tells what all of that does, a run that was stopped can go on.
        """
        options = {
            "quantize": stands_for,
            "dialect": dialect,
            "max_shard_size": self.max_shard_size,
        }
        how = How(
            choose,
            dialect,
            self.max_shard_size,
            self.threads,
            self.progress,
            state=state,
            ranks=self.ranks or Alone(),
        )
        return make_folder(
            Weights(archive, where, how),
            target,
            edit,
            job=job_of(archive, where, options) if stands_for is not None else None,
            replace=self.replace,
            storage_options=self.storage_options,
        )


def quantization_of(data: Json) -> QuantizationConfig | None:
    """Return how the tensors of a folder are quantized in the way of compressed-tensors, if so."""
    before = without_section(data)  # of what we coded, the section from before
    section = before.get("quantization_config") or before.get("compression_config")
    if not isinstance(section, dict):
        return None
    if section.get("quant_method", COMPRESSED_TENSORS) != COMPRESSED_TENSORS:
        raise ConfigError(f"is quantized by {section['quant_method']}, another library")
    config = QuantizationConfig.from_dict(before)
    return config if config.config_groups else None


def check_config(data: Json, source: StrPath) -> None:
    """Raise if there is no `config.json`, which alone tells what codes of that dialect mean."""
    if not data:
        raise ConfigError(f"{source}: has no config.json, which {COMPRESSED_TENSORS} needs")


def main_dtype(archive: Archive) -> torch.dtype:
    """Return the dtype of most weights and scales that are left."""
    sizes: Counter[torch.dtype] = Counter({torch.bfloat16: 0})
    for spec in map(archive.spec, archive):
        if spec.dtype.is_floating_point and spec.dtype.itemsize > 1:
            sizes[spec.dtype] += spec.nbytes
    return sizes.most_common(1)[0][0]


def dtype_of(data: Json) -> torch.dtype | None:
    """Return the dtype of a model's weights, if its config says it."""
    said = data.get("dtype") or data.get("torch_dtype")
    if said is None:
        return None
    name = str(said).removeprefix("torch.")
    try:
        return find_dtype(name)
    except KeyError:
        raise ConfigError(f"config.json: the dtype {name!r} does not exist") from None
