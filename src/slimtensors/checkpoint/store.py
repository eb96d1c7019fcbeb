"""Save and load checkpoints: one folder each, complete or absent."""

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.delta import tensor_digest
from slimtensors.archive.summary import Summary, format_bytes
from slimtensors.archive.tree import flatten as taken_apart
from slimtensors.archive.tree import unflatten
from slimtensors.archive.write import ArchiveSource, given, write
from slimtensors.checkpoint.coding import (
    NEEDS_BASE,
    NEEDS_SIBLING,
    SAME,
    WHOLE,
    Coding,
    TensorEntry,
    decay_since,
    decode_entry,
)
from slimtensors.checkpoint.manifest import (
    STATE,
    CheckpointBase,
    CheckpointManifest,
    content_id,
    is_checkpoint,
    read_manifest,
    write_manifest,
)
from slimtensors.checkpoint.policy import (
    WEIGHT_MATRICES,
    Filter,
    Profile,
    describe_roles,
    find_profile,
    select_tensors,
)
from slimtensors.checkpoint.precision import rounding
from slimtensors.checkpoint.state import build_checkpoint, restore_checkpoint
from slimtensors.codecs.presets import Chooser
from slimtensors.errors import (
    ConfigError,
    CorruptFileError,
    FormatError,
    MismatchError,
    UnsupportedTensorError,
)
from slimtensors.parallel import Each, Workers
from slimtensors.storage import StrPath, local_path
from slimtensors.storage.atomic import create_folder, write_file_atomically
from slimtensors.tensor import Json, Spec


class StoredState:
    """A checkpoint on disk: names at once, tensors when asked for."""

    def __init__(self, folder: Path, *, base: Path | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._archive = Archive(folder / STATE)
        self._entries, self.tied = stored_entries(self._archive)
        self._base_folder = base
        self._base: StoredState | None = None
        if self.manifest.base is not None:
            self._base = self._opened_base()

    @property
    def tree(self) -> Json | None:
        """What the state holds besides tensors."""
        return self._archive.tree

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors, without tied ones."""
        yield from (self._entries or (n for n in self._archive if n not in self.tied))

    def __contains__(self, name: object) -> bool:
        return name in (self._entries or self._archive)

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        return self._entries[name].like if self._entries else self._archive.spec(name)

    def kind(self, name: str) -> str:
        """Return in which way a tensor is stored, as its entry calls it."""
        return self._entries[name].kind if self._entries else WHOLE

    def load(self, name: str, each: Each, siblings: dict[str, Tensor] | None = None) -> Tensor:
        """Read and decode a tensor; `siblings` are others of this checkpoint that were read."""
        if not self._entries:
            return self._archive.load_one(name, each)
        entry = self._entries[name]
        other = None
        if entry.kind in NEEDS_SIBLING:
            assert entry.by is not None
            known = siblings or {}
            other = known[entry.by] if entry.by in known else self.load(entry.by, each)
        elif entry.kind in NEEDS_BASE:
            other = self._from_base(name, entry, each)
        r = None if entry.kind == SAME else self._archive.load_one(name, each)
        try:
            return decode_entry(entry, r, other, each)
        except CorruptFileError as error:
            raise CorruptFileError(f"{self._archive.path}: {name}: {error}") from error

    def load_all(self, *, threads: int | None = None) -> dict[str, Tensor]:
        """Read everything, what others are decoded by first."""
        names = list(self.names())
        later = {name for name, e in self._entries.items() if e.kind in NEEDS_SIBLING}
        found: dict[str, Tensor] = {}
        with Workers(threads) as workers:

            def one(name: str) -> Tensor:
                return self.load(name, workers.each, found)

            for some in ([n for n in names if n not in later], [n for n in names if n in later]):
                results = workers.in_order(one, some, lambda name: self.spec(name).nbytes)
                found.update(zip(some, results, strict=True))
        tensors = {name: found[name] for name in names}
        return tensors | {name: tensors[home] for name, home in self.tied.items()}

    def load_state(self, *, threads: int | None = None) -> dict[str, Any]:
        """Read everything and put it together as it was."""
        tensors = self.load_all(threads=threads)
        if self.tree is None:
            return dict(tensors)
        try:
            state = unflatten(self.tree, tensors)
        except FormatError as error:
            raise type(error)(f"{self._archive.path}: {error}") from error
        if not isinstance(state, dict):
            raise CorruptFileError(f"{self._archive.path}: holds no table")
        return state

    def _opened_base(self) -> "StoredState":
        base = self.manifest.base
        assert base is not None
        home = self._base_folder or self.folder.parent / base.name
        if home.resolve() == self.folder.resolve():
            raise CorruptFileError(f"{self.folder}: says that it is a difference from itself")
        needs = f"{self.folder}: is a difference from {base.name} (id {base.id})"
        if not is_checkpoint(home):
            raise MismatchError(f"{needs}, which is not at {home}; bring it back, or pass base=...")
        if (have := read_manifest(home).id) != base.id:
            raise MismatchError(f"{needs}; the checkpoint at {home} has the id {have}")
        return StoredState(home)

    def _from_base(self, name: str, entry: TensorEntry, each: Each) -> Tensor:
        if self._base is None or name not in self._base:
            raise CorruptFileError(f"{self._archive.path}: {name}: its base has no such tensor")
        y = self._base.load(name, each)
        if tensor_digest(y) != entry.base:
            raise MismatchError(
                f"{self._base.folder}: {name}: is not the tensor that {self.folder} was made from"
            )
        return y


def stored_entries(archive: Archive) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    """Return how each tensor is stored, nothing if all are there as they are; and tied names."""
    if archive.delta is None:
        return {}, archive.tied()
    match archive.delta:
        case {"checkpoint": dict(entries), "tied": dict(tied)} if (
            all(isinstance(entry, dict) for entry in entries.values())
            and tied.keys().isdisjoint(entries)
            and all(isinstance(home, str) and home in entries for home in tied.values())
        ):
            parsed = {name: TensorEntry.from_json(entry) for name, entry in entries.items()}
        case _:
            raise CorruptFileError(f"{archive.path}: does not say how its tensors are stored")
    for name, entry in parsed.items():
        if entry.kind != SAME and name not in archive:
            raise CorruptFileError(f"{archive.path}: {name}: is missing")
        if entry.by is not None and _leads_on(parsed.get(entry.by)):
            raise CorruptFileError(f"{archive.path}: {name}: cannot be decoded by {entry.by}")
    return parsed, tied


def _leads_on(entry: TensorEntry | None) -> bool:
    return entry is None or entry.kind in NEEDS_SIBLING


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
    manifest: CheckpointManifest
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
        return f"{self.path.name}: {about.kind}{base}, {about.profile}, {format_bytes(about.bytes)}"


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
    abouts = describe_roles(state.tensors, state.whole)
    allowed = select_tensors(lossy, abouts) if lossy is not None else set(abouts)
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
        base=CheckpointBase(before.folder.name, before.manifest.id) if before else None,
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
    home = local_path(base) if base is not None else None
    return StoredState(local_path(path), base=home).load_state(threads=threads)


def flatten(path: StrPath, target: StrPath, *, threads: int | None = None) -> Saved:
    """Write a checkpoint again so that it needs no other one."""
    stored = StoredState(local_path(path))
    about = stored.manifest
    state = FlatState.of(stored.load_state(threads=threads))
    labels = _How(profile=about.profile, errors=about.errors)
    return _save(state, target, given(state.tensors, state.tree), labels, threads=threads)


def _save_rounded(state: FlatState, path: StrPath, lossy: Filter, threads: int | None) -> Saved:
    names = select_tensors(lossy, describe_roles(state.tensors, state.whole))
    labels = _How(rounding(names), "int8", rounded=names)
    return _save(state, path, given(state.tensors, state.tree), labels, threads=threads)


@dataclass(frozen=True)
class _How:
    """How the tensors of a checkpoint are coded, and what its description says of that."""

    preset: str | Chooser = "lossless"
    profile: str = "exact"
    base: CheckpointBase | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    kept_exact: Mapping[str, str] = field(default_factory=dict)
    rounded: Collection[str] = ()
    """Names of tensors that the preset is to round."""
    files: Mapping[str, bytes] = field(default_factory=dict)


def _save(
    state: FlatState, path: StrPath, content: ArchiveSource, how: _How, *, threads: int | None
) -> Saved:
    with create_folder(path) as folder:
        file = folder / STATE
        summary = write(content, file, preset=how.preset, dialect="slim", threads=threads)
        measured = {t.name: t.error for t in summary.tensors if t.error is not None}
        manifest = CheckpointManifest(
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
            write_file_atomically(folder / name, raw)
        write_manifest(folder, manifest)
    exact = (t for t in summary.tensors if t.name in how.rounded and t.error is None)
    kept_exact = {**{t.name: t.note for t in exact}, **how.kept_exact}
    return Saved(local_path(path), manifest, summary, kept_exact)


def _opened_base(base: StrPath, path: StrPath) -> StoredState:
    home, here = (Path(os.path.realpath(local_path(p))) for p in (base, path))
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
