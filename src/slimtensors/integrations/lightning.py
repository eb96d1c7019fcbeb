"""Checkpoints for Lightning: compressed, and stored as differences from earlier ones."""

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import Tensor
from torch.utils._pytree import tree_map

from slimtensors.checkpoint import Point, list_checkpoints, load_checkpoint
from slimtensors.checkpoint.profiles import Profile, find_profile
from slimtensors.checkpoint.run import (
    choose_base,
    count_since_keyframe,
    find_mentioned,
    find_unreadable,
    flatten_deltas,
    include_bases,
    save_with_base,
)
from slimtensors.checkpoint.store import FlatState, SaveOptions
from slimtensors.errors import ConfigError
from slimtensors.storage import local_path
from slimtensors.storage.atomic import remove_folder, write_file_atomically

_REMOVED = "unwanted"
"""File that marks a checkpoint as removed while others still need it."""


class SlimCheckpointIO(CheckpointIO):
    """Lightning plug-in that saves each checkpoint as a compressed folder.

    A checkpoint that Lightning removes stays on disk until no other checkpoint needs it.

    Args:
        base: `auto` saves differences from earlier checkpoints, None saves each in full.
        keyframe_every: save in full at least once in so many checkpoints.
        profile: precision of weights and optimizer state, as for `save_checkpoint`.
        threads: number of threads; by default one per core.

    Example:
        >>> from lightning import Trainer
        >>> from slimtensors.integrations.lightning import SlimCheckpointIO
        >>> trainer = Trainer(plugins=[SlimCheckpointIO(profile="optimizer-bf16")])
    """

    def __init__(
        self,
        *,
        base: str | None = "auto",
        keyframe_every: int = 8,
        profile: str | Profile = "exact",
        threads: int | None = None,
    ) -> None:
        self._base, self._keyframe_every = base, keyframe_every
        self._profile, self._threads = find_profile(profile), threads

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; replace one of the same name when the new one is complete."""
        if storage_options is not None:
            raise ConfigError("SlimCheckpointIO does not support storage_options")
        target, state = local_path(path), FlatState.of(checkpoint)
        if target.is_symlink():
            target.unlink()  # made by save_last="link"; the checkpoint that it leads to stays
        if target.is_dir():
            flatten_deltas(target, threads=self._threads)
        base = self._next_base(target) if target.parent.is_dir() else None
        options = SaveOptions(
            base.path if base else None, self._profile, threads=self._threads, replace=True
        )
        save_with_base(state, target, options)

    def load_checkpoint(
        self,
        path: str | Path,
        map_location: Any | None = None,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint; it contains only tensors and plain values."""
        state = load_checkpoint(path, threads=self._threads)
        if map_location is None:
            return state
        if not isinstance(map_location, str | torch.device):
            raise ConfigError(f"map_location must be a device, got {map_location!r}")
        return dict(tree_map(lambda x: x.to(map_location) if isinstance(x, Tensor) else x, state))

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, or mark it as removed while another one needs it."""
        target = local_path(path)
        if not target.exists():
            return
        if not (target / _REMOVED).exists():
            write_file_atomically(target / _REMOVED, b"")
        found = list_checkpoints(target.parent)
        removed = {point.name for point in found if (point.path / _REMOVED).exists()}
        needed = {point.name for point in found} - removed
        needed |= find_mentioned(find_unreadable(target.parent), target.parent, found)
        keep = include_bases(needed, found)
        for point in reversed(found):
            if point.name not in keep:
                remove_folder(point.path)

    def _next_base(self, target: Path) -> Point | None:
        """Choose a base; not `last.ckpt`, which is replaced by each save."""
        found = [
            point
            for point in list_checkpoints(target.parent)
            if point.path != target
            and not point.name.startswith("last")
            and not (point.path / _REMOVED).exists()
        ]
        return choose_base(found, self._base, count_since_keyframe(found), self._keyframe_every)
