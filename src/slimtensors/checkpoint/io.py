"""Checkpoints on disk: a folder for each, written whole or not at all."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors import archive
from slimtensors.archive.state import given
from slimtensors.archive.write import write
from slimtensors.checkpoint.commit import new_folder
from slimtensors.checkpoint.filters import WEIGHT_MATRICES, Filter, chosen
from slimtensors.checkpoint.manifest import (
    STATE,
    Manifest,
    content_id,
    read_manifest,
    write_manifest,
)
from slimtensors.checkpoint.roles import describe
from slimtensors.checkpoint.rounding import rounding
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint
from slimtensors.container import StrPath, local
from slimtensors.errors import ConfigError
from slimtensors.spec import Json
from slimtensors.summary import Summary, human
from slimtensors.tree import flatten

__all__ = [
    "Saved",
    "build_checkpoint",
    "load_checkpoint",
    "restore_checkpoint",
    "save_checkpoint",
]


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was written."""

    path: Path
    manifest: Manifest
    summary: Summary
    """How each tensor is stored."""
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that were chosen to be rounded and are not, and why."""

    @property
    def errors(self) -> Mapping[str, float]:
        """Relative RMS error of each tensor that is not exact, as measured."""
        return self.manifest.errors

    def __str__(self) -> str:
        sizes = f"{human(self.summary.dense_bytes)} -> {human(self.manifest.bytes)}"
        return f"{self.path.name}: {self.manifest.kind}, {self.manifest.profile}: {sizes}"


@dataclass(frozen=True)
class FlatState:
    """A state taken apart: its tensors by name, and an outline of the rest."""

    tensors: Mapping[str, Tensor]
    tree: Json | None
    whole: Mapping[str, Any]
    """The state that it was; its tensors may have changed since."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "FlatState":
        """Take a state apart; raise, with its path, if something in it cannot be stored."""
        return cls(*flatten(state), state)


def save_checkpoint(
    checkpoint: Mapping[str, Any],
    path: StrPath,
    *,
    quantize_i8: bool = False,
    lossy: Filter | None = None,
    threads: int | None = None,
) -> Saved:
    """Write a training state to a folder, which is new or empty. Exact, unless asked otherwise.

    `quantize_i8` rounds weight matrices, or what `lossy` chooses, to 8-bit integers; tensors that
    hold NaN or infinity stay exact. The result tells the error of each.
    """
    return save_flat(
        FlatState.of(checkpoint), path, quantize_i8=quantize_i8, lossy=lossy, threads=threads
    )


def save_flat(
    state: FlatState,
    path: StrPath,
    *,
    quantize_i8: bool = False,
    lossy: Filter | None = None,
    threads: int | None = None,
) -> Saved:
    """Do what `save_checkpoint` does with a state that was taken apart before."""
    if lossy is not None and not quantize_i8:
        raise ConfigError("lossy chooses what to round, but nothing is to be: quantize_i8=True")
    rounded: set[str] = set()
    if quantize_i8:
        rounded = chosen(lossy or WEIGHT_MATRICES, describe(state.tensors, state.whole))
    with new_folder(path) as folder:
        summary = write(
            given(state.tensors, state.tree),
            folder / STATE,
            preset=rounding(rounded),
            dialect="slim",
            threads=threads,
        )
        errors = {t.name: t.error for t in summary.tensors if t.error is not None}
        manifest = Manifest(
            id=content_id(folder / STATE),
            step=_number(state.whole, "step"),
            epoch=_number(state.whole, "epoch"),
            profile="int8" if quantize_i8 else "exact",
            bytes=(folder / STATE).stat().st_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            metrics=_metrics(state.whole),
            errors=errors,
        )
        write_manifest(folder, manifest)
    kept = {t.name: t.note for t in summary.tensors if t.name in rounded and t.error is None}
    return Saved(local(path), manifest, summary, kept)


def load_checkpoint(path: StrPath, *, threads: int | None = None) -> dict[str, Any]:
    """Read a training state, checking every checksum."""
    folder = local(path)
    read_manifest(folder)
    return archive.load(folder / STATE, threads=threads)


def _number(state: Mapping[str, Any], key: str) -> int | None:
    value = state.get(key)
    return value if type(value) is int else None


def _metrics(state: Mapping[str, Any]) -> dict[str, float]:
    metrics = state.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
