"""Checkpoints on disk: a folder for each, written whole or not at all."""

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.archive.state import State, given
from slimtensors.archive.write import write
from slimtensors.checkpoint.coding import Coding
from slimtensors.checkpoint.commit import new_folder, write_file
from slimtensors.checkpoint.decay import decay_since
from slimtensors.checkpoint.filters import WEIGHT_MATRICES, Filter, chosen
from slimtensors.checkpoint.manifest import (
    STATE,
    Base,
    Manifest,
    content_id,
    write_manifest,
)
from slimtensors.checkpoint.profiles import Profile, find_profile
from slimtensors.checkpoint.reading import StoredState
from slimtensors.checkpoint.roles import describe
from slimtensors.checkpoint.rounding import rounding
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint
from slimtensors.container import StrPath, local
from slimtensors.errors import ConfigError, UnsupportedTensorError
from slimtensors.presets import Chooser
from slimtensors.spec import Json
from slimtensors.summary import Summary, human
from slimtensors.tree import flatten as taken_apart

__all__ = [
    "FlatState",
    "Saved",
    "build_checkpoint",
    "flatten",
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
    """Names of tensors that were to be rounded and are not, and why."""

    @property
    def errors(self) -> Mapping[str, float]:
        """Relative RMS error of each tensor that is not exact, as measured."""
        return self.manifest.errors

    def __str__(self) -> str:
        about = self.manifest
        base = f" from {about.base.name}" if about.base else ""
        return f"{self.path.name}: {about.kind}{base}, {about.profile}, {human(about.bytes)}"


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
        if not isinstance(state, Mapping):
            kind = type(state).__name__
            raise UnsupportedTensorError(
                f"a checkpoint is a table, as build_checkpoint returns, not a {kind}"
            )
        found, tree = taken_apart(state)
        tensors = {name: x for name, x in found.items() if isinstance(x, Tensor)}
        for name in found.keys() - tensors.keys():
            raise UnsupportedTensorError(f"{name}: is encoded already; a checkpoint does that")
        return cls(tensors, tree, state)


def save_checkpoint(
    checkpoint: Mapping[str, Any],
    path: StrPath,
    *,
    base: StrPath | None = None,
    profile: str | Profile = "exact",
    quantize_i8: bool = False,
    lossy: Filter | None = None,
    threads: int | None = None,
) -> Saved:
    """Write a training state to a folder, which is new or empty. Exact, unless asked otherwise.

    With `base`, another checkpoint beside it, only what differs is stored; tensors that are the
    same cost nothing. `profile` says what may be rounded (see `PROFILES`), `quantize_i8` rounds
    weight matrices to 8-bit integers; `lossy` chooses fewer tensors, or for `quantize_i8` other
    ones. Tensors that hold NaN or infinity stay exact. The result tells the error of each.
    """
    state = FlatState.of(checkpoint)
    if quantize_i8:
        if base is not None or profile != "exact":
            raise ConfigError("quantize_i8 stands alone: it takes neither a base nor a profile")
        return _save_rounded(state, path, lossy or WEIGHT_MATRICES, threads)
    return save_flat(state, path, base=base, profile=profile, lossy=lossy, threads=threads)


def save_flat(
    state: FlatState,
    path: StrPath,
    *,
    base: StrPath | None = None,
    profile: str | Profile = "exact",
    lossy: Filter | None = None,
    files: Mapping[str, bytes] | None = None,
    threads: int | None = None,
) -> Saved:
    """Do what `save_checkpoint` does with a state that was taken apart before.

    `files` are small ones that somebody else wants to find in the same folder.
    """
    how = find_profile(profile)
    if lossy is not None and how.is_exact:
        raise ConfigError("lossy chooses what to round, but nothing is to be: choose a profile")
    if how.is_model_only:
        state = FlatState.of(_model_only(state))
    if base is None and how.is_exact:
        plain = given(state.tensors, state.tree)
        return _save(state, path, plain, _How(files=files or {}), threads=threads)
    abouts = describe(state.tensors, state.whole)
    allowed = chosen(lossy, abouts) if lossy is not None else set(abouts)
    before = _opened_base(base, path) if base is not None else None
    coding = Coding(
        state.tensors,
        abouts,
        step=state.whole.get("step"),
        decay=decay_since(before, state.tensors, state.whole),
        profile=how,
        allowed=allowed,
        base=before,
    )
    labels = _How(
        "lossless-max",
        how.name,
        base=Base(before.folder.name, before.manifest.id) if before else None,
        errors=coding.errors,
        kept_exact=coding.kept_exact,
        files=files or {},
    )
    return _save(state, path, coding.state(state.tree), labels, threads=threads)


def load_checkpoint(
    path: StrPath, *, base: StrPath | None = None, threads: int | None = None
) -> dict[str, Any]:
    """Read a training state, checking every checksum.

    A delta needs its base, by default the folder of that name beside it.
    """
    home = local(base) if base is not None else None
    return StoredState(local(path), base=home).load_state(threads=threads)


def flatten(path: StrPath, target: StrPath, *, threads: int | None = None) -> Saved:
    """Write a checkpoint again so that it needs no other one."""
    stored = StoredState(local(path))
    about = stored.manifest
    state = FlatState.of(stored.load_state(threads=threads))
    labels = _How(profile=about.profile, errors=about.errors)
    return _save(state, target, given(state.tensors, state.tree), labels, threads=threads)


def _save_rounded(state: FlatState, path: StrPath, lossy: Filter, threads: int | None) -> Saved:
    names = chosen(lossy, describe(state.tensors, state.whole))
    labels = _How(rounding(names), "int8", rounded=names)
    return _save(state, path, given(state.tensors, state.tree), labels, threads=threads)


@dataclass(frozen=True)
class _How:
    """How the tensors of a checkpoint are coded, and what its description says of that."""

    preset: str | Chooser = "lossless"
    profile: str = "exact"
    base: Base | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    rounded: Collection[str] = ()
    """Names of tensors that the preset is to round."""
    files: Mapping[str, bytes] = field(default_factory=dict)


def _save(
    state: FlatState, path: StrPath, content: State, how: _How, *, threads: int | None
) -> Saved:
    with new_folder(path) as folder:
        file = folder / STATE
        summary = write(content, file, preset=how.preset, dialect="slim", threads=threads)
        measured = {t.name: t.error for t in summary.tensors if t.error is not None}
        manifest = Manifest(
            id=content_id(file),
            step=_number(state.whole, "step", "global_step"),
            epoch=_number(state.whole, "epoch"),
            profile=how.profile,
            bytes=file.stat().st_size,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            metrics=_metrics(state.whole),
            base=how.base,
            errors={**measured, **how.errors},
        )
        for name, raw in how.files.items():
            write_file(folder / name, raw)
        write_manifest(folder, manifest)
    exact = (t for t in summary.tensors if t.name in how.rounded and t.error is None)
    kept_exact = {**{t.name: t.note for t in exact}, **how.kept_exact}
    return Saved(local(path), manifest, summary, kept_exact)


def _opened_base(base: StrPath, path: StrPath) -> StoredState:
    home, here = (Path(os.path.realpath(local(p))) for p in (base, path))
    if home.parent != here.parent:
        raise ConfigError(f"{base}: lies in another folder; a base is saved beside its deltas")
    return StoredState(home)


def _model_only(state: FlatState) -> dict[str, Any]:
    """Return a state of which only the model and what describes it are left."""
    kept = {"model", "state_dict", "layout", "epoch", "step", "global_step", "metrics"}
    tensors, whole = state.tensors, state.whole
    parts = {key: value if key in kept else None for key, value in whole.items()}
    for key in ("model", "state_dict"):
        if isinstance(parts.get(key), Mapping):  # as they were when the state was taken apart
            parts[key] = {name: tensors.get(f"{key}.{name}", x) for name, x in whole[key].items()}
    return parts


def _number(state: Mapping[str, Any], *keys: str) -> int | None:
    values = (state.get(key) for key in keys)
    return next((value for value in values if type(value) is int), None)


def _metrics(state: Mapping[str, Any]) -> dict[str, float]:
    metrics = state.get("metrics")
    if not isinstance(metrics, dict):
        return {}
    return {str(k): float(v) for k, v in metrics.items() if isinstance(v, int | float)}
