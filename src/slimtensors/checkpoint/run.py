"""Runs: folders of checkpoints. List, verify and repair them; choose bases; apply retention."""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, overload

from slimtensors import archive
from slimtensors.checkpoint.documents import MAX_BASES
from slimtensors.checkpoint.manifest import (
    MANIFEST,
    CheckpointBase,
    CheckpointManifest,
    is_checkpoint,
    read_manifest,
    write_manifest,
)
from slimtensors.checkpoint.pretrained import Pretrained
from slimtensors.checkpoint.store import (
    STATE,
    FlatState,
    Saved,
    SaveOptions,
    StoredState,
    save_state,
)
from slimtensors.errors import ConfigError, FormatError, MismatchError, describe_error
from slimtensors.storage import (
    INCOMPLETE,
    Folder,
    RemoteLocation,
    StrPath,
    locate_folder,
    parent_of,
    read_bytes,
)
from slimtensors.storage.atomic import (
    create_folder,
    find_leftovers,
    lock_folder,
    remove_folder,
    remove_unlocked,
)
from slimtensors.storage.claim import claim
from slimtensors.storage.files import link_or_copy
from slimtensors.storage.upload import find_interrupted, remove_interrupted, remove_uploaded

_log = logging.getLogger(__name__)

T = TypeVar("T")

LOCK = ".lock"
"""Claim of a process that writes to a remote run."""
_REQUESTS = 16

DAMAGED = "damaged-"
"""Prefix of folders that were set aside because their step was saved again."""
_KEPT = "base-"
"""Prefix of folders that contain a removed or replaced checkpoint because deltas need it."""


@dataclass(frozen=True)
class RunPoint:
    """A complete checkpoint of a run, which may be remote."""

    path: Folder
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.path.name

    @property
    def order(self) -> tuple[int, str, str]:
        """Sort key: from the oldest to the newest checkpoint."""
        step = self.manifest.step
        return (-1 if step is None else step, self.manifest.created, self.name)


@dataclass(frozen=True)
class Point(RunPoint):
    """A complete checkpoint of a local run."""

    path: Path


P = TypeVar("P", bound=RunPoint)


def is_run(path: StrPath, *, storage_options: dict[str, Any] | None = None) -> bool:
    """Return True if a folder or URL contains checkpoints and is not a checkpoint itself."""
    folder = locate_folder(path, storage_options)
    if not isinstance(folder, Path):
        if folder.is_http or not folder.exists() or is_checkpoint(folder):
            return False
        return any(map(is_checkpoint, folder.folders()))
    if not folder.is_dir() or is_checkpoint(folder):
        return False
    return any(is_checkpoint(child) for child in folder.iterdir())


def state_file(path: StrPath) -> StrPath:
    """Return the path of the tensors if `path` is a checkpoint folder, else `path`."""
    folder = locate_folder(path)
    if not isinstance(folder, Path):
        is_state = not folder.is_http and is_checkpoint(folder)
        return f"{str(path).rstrip('/')}/{STATE}" if is_state else path
    return folder / STATE if is_checkpoint(folder) else path


@overload
def list_checkpoints(run: Path) -> list[Point]: ...
@overload
def list_checkpoints(
    run: StrPath, *, storage_options: dict[str, Any] | None = None
) -> Sequence[RunPoint]: ...
def list_checkpoints(
    run: StrPath, *, storage_options: dict[str, Any] | None = None
) -> Sequence[RunPoint]:
    """Return the complete checkpoints of a run, a folder or a URL, the newest last."""
    return list_points(locate_folder(run, storage_options))


def list_points(run: Folder) -> Sequence[RunPoint]:
    """Return the complete checkpoints of a run, the newest last."""
    folders = [p for p in _list_folders(run) if not p.name.startswith(DAMAGED)]
    pairs = zip(folders, _map_folders(_try_read_manifest, folders), strict=True)
    points = [_make_point(folder, manifest) for folder, manifest in pairs if manifest is not None]
    return sorted(points, key=lambda point: point.order)


def _make_point(folder: Folder, manifest: CheckpointManifest) -> RunPoint:
    return Point(folder, manifest) if isinstance(folder, Path) else RunPoint(folder, manifest)


def _map_folders(function: Callable[[Folder], T], folders: Sequence[Folder]) -> Iterable[T]:
    """Return the results of a function, computed at the same time where they take requests."""
    if not any(isinstance(folder, RemoteLocation) for folder in folders):
        return map(function, folders)
    with ThreadPoolExecutor(_REQUESTS) as pool:
        return list(pool.map(function, folders))


def find_unreadable(
    run: StrPath, *, storage_options: dict[str, Any] | None = None
) -> dict[str, str]:
    """Return the unreadable checkpoints of a run by folder name, with the reason.

    They may be damaged, or written by a newer version or another program; nothing removes them.
    """
    return find_unreadable_points(locate_folder(run, storage_options))


def find_unreadable_points(run: Folder) -> dict[str, str]:
    """Return the unreadable checkpoints of a run by folder name, with the reason."""
    folders = list(_list_folders(run))
    found = zip(folders, _map_folders(_find_manifest_error, folders), strict=True)
    return {folder.name: problem for folder, problem in found if problem}


def find_mentioned(names: Iterable[str], run: Path, points: Sequence[Point]) -> set[str]:
    """Return the checkpoints whose names or ids occur in the `checkpoint.json` of these folders.

    The files may be damaged; one of the checkpoints may be the base of a repairable one.
    """
    texts = []
    for name in names:
        with suppress(FormatError, OSError):  # not a file, or not permitted
            texts.append(read_bytes(run / name / MANIFEST))
    keys = {p.name: (f'"{p.name}"'.encode(), p.manifest.id.encode()) for p in points}
    return {name for name, found in keys.items() if any(k in text for text in texts for k in found)}


def remove_checkpoint(path: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
    """Remove a checkpoint; raise `ConfigError` if it is the base of another one in its run."""
    folder = locate_folder(path, storage_options)
    read_manifest(folder)
    if folder.is_symlink():
        raise ConfigError(f"{folder} is a link; remove the folder that it leads to")
    for point in list_points(parent_of(folder)):
        base = point.manifest.base
        if base is not None and base.name == folder.name:
            raise ConfigError(f"{folder} is the base of {point.name}; flatten {point.name} first")
    if isinstance(folder, Path):
        remove_folder(folder)
    else:
        remove_uploaded(folder, manifest=MANIFEST)


@dataclass(frozen=True)
class RunVerification:
    """Result of `verify_run`; true if the run is intact."""

    checkpoints: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Unusable checkpoints, with the reason."""
    incomplete: Sequence[str] = ()
    """Temporary folders of interrupted saves; `repair` removes them."""
    unsealed: Sequence[str] = ()
    """Checkpoints of format version 1, in which changes of `checkpoint.json` go unnoticed."""

    def __bool__(self) -> bool:
        return not self.damaged and not self.incomplete


def verify_run(
    run: StrPath, *, threads: int | None = None, storage_options: dict[str, Any] | None = None
) -> RunVerification:
    """Read every checkpoint of a run; verify all checksums and that all bases are intact."""
    folder = locate_folder(run, storage_options)
    found = list_points(folder)
    damaged: dict[str, str] = {}
    for point in found:
        try:
            problem = _find_damage(point, threads)
        except (FormatError, MismatchError, OSError) as error:
            problem = describe_error(error)
        if problem and point.path.exists():  # else removed by another process in the meantime
            damaged[point.name] = problem
    for point in found:
        bases = find_bases(point.name, found)
        if point.name not in damaged and not bases.isdisjoint(damaged):
            names = ", ".join(sorted(bases & damaged.keys()))
            damaged[point.name] = f"{point.path} cannot be restored: damaged base {names}"
    damaged |= find_unreadable_points(folder)
    unsealed = [point.name for point in found if not point.manifest.is_sealed]
    return RunVerification(len(found), damaged, _find_incomplete(folder), unsealed)


def find_incomplete(run: StrPath, *, storage_options: dict[str, Any] | None = None) -> list[str]:
    """Return the folders of interrupted saves in a run, which `repair_run` removes."""
    return _find_incomplete(locate_folder(run, storage_options))


def _find_incomplete(run: Folder) -> list[str]:
    found: Iterable[Folder]
    found = find_leftovers(run) if isinstance(run, Path) else find_interrupted(run)
    return [path.name for path in found]


def repair_run(run: StrPath, *, storage_options: dict[str, Any] | None = None) -> list[str]:
    """Remove folders of interrupted saves, and return their names.

    Everything else stays: folders in use, and unreadable checkpoints, which `find_unreadable`
    lists.
    """
    folder = locate_folder(run, storage_options)
    if isinstance(folder, Path):
        with lock_folder(folder):
            return remove_incomplete(folder)
    with claim(folder / LOCK):
        return remove_interrupted(folder, manifest=MANIFEST)


def remove_incomplete(run: Path) -> list[str]:
    """Repair a run that the caller has locked; see `repair_run`."""
    return [path.name for path in find_leftovers(run) if remove_unlocked(path)]


def _find_damage(point: RunPoint, threads: int | None) -> str:
    stored = StoredState(point.path)
    stored.find_pretrained()  # opens its bases too
    result = archive.verify(stored.archive, threads=threads)
    return next(iter(result.damaged.values()), "")


def _list_folders(run: Folder) -> Sequence[Folder]:
    if not isinstance(run, Path):
        return [folder for folder in run.folders() if not folder.name.startswith(".")]
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such folder")
    return [p for p in sorted(run.iterdir()) if p.is_dir() and not p.name.startswith(".")]


def _try_read_manifest(folder: Folder) -> CheckpointManifest | None:
    try:
        return read_manifest(folder)
    except (FormatError, OSError):
        return None


def _find_manifest_error(folder: Folder) -> str:
    """Return why the manifest of a checkpoint folder is unreadable, or an empty string."""
    try:
        if isinstance(folder, RemoteLocation) and (folder / INCOMPLETE).exists():
            return ""  # being written or removed, or left by a killed process
        if not any((folder / name).exists() for name in (MANIFEST, STATE)):
            return ""
        if folder.name.startswith(DAMAGED):
            return "set aside as damaged; its step was saved again"
        read_manifest(folder)
    except FileNotFoundError:  # removed by another process in the meantime
        return ""
    except (FormatError, OSError) as error:
        return describe_error(error)
    return ""


@dataclass(frozen=True)
class Retention:
    """Rules for which checkpoints to keep; without rules, all."""

    last: int | None = None
    """Number of newest checkpoints to keep."""
    every: int | None = None
    """Keep the checkpoints whose step is a multiple of this."""
    best: str | None = None
    """Metric whose best checkpoint is kept."""
    best_is: str = "min"
    names: frozenset[str] = frozenset()
    """Checkpoints to keep in any case; they count towards `last`."""

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")
        if self.best_is not in ("min", "max"):
            raise ConfigError(f"best_is must be 'min' or 'max', got {self.best_is!r}")

    def select(
        self, points: Sequence[P], is_intact: Callable[[P], bool] = lambda point: True
    ) -> set[str]:
        """Return the names to keep, including bases; the newest intact one is always kept.

        Damaged checkpoints do not count as last or best. `is_intact` is called only as needed.
        """
        if self.last is None and self.every is None and self.best is None:
            return {point.name for point in points}
        keep = [point.name for point in points if point.name in self.names]
        newest = next(filter(is_intact, reversed(points)), None)
        is_named = newest is not None and newest.name in self.names
        count = max((self.last or 1) - len(keep), 0 if is_named else 1)
        others = (point for point in reversed(points) if point.name not in self.names)
        keep += [point.name for point in itertools.islice(filter(is_intact, others), count)]
        if self.every is not None:
            steps = ((point, point.manifest.step) for point in points)
            keep += [p.name for p, step in steps if step is not None and step % self.every == 0]
        if self.best is not None:
            keep += self._find_best(points, self.best, is_intact)
        return include_bases(keep, points)

    def _find_best(
        self, points: Sequence[P], metric: str, is_intact: Callable[[P], bool]
    ) -> list[str]:
        sign = 1 if self.best_is == "min" else -1
        values = ((point.manifest.metrics.get(metric, math.nan), point) for point in points)
        candidates = [(sign * value, point) for value, point in values if not math.isnan(value)]
        ranked = (point for _, point in sorted(candidates, key=lambda pair: pair[0]))
        return [point.name for point in itertools.islice(filter(is_intact, ranked), 1)]


def include_bases(names: Iterable[str], points: Sequence[RunPoint]) -> set[str]:
    """Return the names of these checkpoints and of all their direct and indirect bases."""
    by_name = {point.name: point for point in points}
    found: set[str] = set()
    pending = list(names)
    while pending:
        name = pending.pop()
        if name in found or name not in by_name:
            continue
        found.add(name)
        base = by_name[name].manifest.base
        pending += [base.name] if base else []
    return found


def find_bases(name: str, points: Sequence[RunPoint]) -> set[str]:
    """Return the names of all direct and indirect bases of a checkpoint."""
    return include_bases([name], points) - {name}


def discard_checkpoint(folder: Path) -> None:
    """Remove a checkpoint; what deltas need of it stays as `base-ID` until none needs it."""
    keep_for_deltas(folder)
    remove_folder(folder)
    remove_unneeded_bases(folder.parent)


def keep_for_deltas(folder: Path) -> None:
    """Keep a checkpoint as `base-ID` if others need it, so that its name can be reused.

    The new folder shares the file of the old one, where the file system has hard links. Deltas of
    the checkpoint refer to the new folder; each is complete before the next step begins.
    """
    points = [point for point in list_checkpoints(folder.parent) if not point.path.is_symlink()]
    manifest = next((point.manifest for point in points if point.path == folder), None)
    if manifest is None:
        return
    base = CheckpointBase(folder.name, manifest.id)
    deltas = [point for point in points if point.manifest.base == base]
    unreadable = find_unreadable(folder.parent)
    if not deltas and not find_mentioned(unreadable, folder.parent, [Point(folder, manifest)]):
        return
    kept = CheckpointBase(f"{_KEPT}{manifest.id}", manifest.id)
    if not is_checkpoint(folder.with_name(kept.name)):
        with create_folder(folder.with_name(kept.name)) as new:
            link_or_copy(folder / STATE, new / STATE)
            write_manifest(new, manifest)
    for point in deltas:
        write_manifest(point.path, replace(point.manifest, base=kept))


def remove_unneeded_bases(run: Path) -> None:
    """Remove the folders of `keep_for_deltas` that no checkpoint needs any more."""
    points = list_checkpoints(run)
    kept = [point for point in points if is_kept_base(point)]
    if not kept:
        return
    names = {point.name for point in points} - {point.name for point in kept}
    names |= find_mentioned(find_unreadable(run), run, points)
    needed = include_bases(names, points)
    for point in reversed(kept):
        if point.name not in needed:
            remove_folder(point.path)


def is_kept_base(point: Point) -> bool:
    """Return True for a folder of `keep_for_deltas`."""
    return point.name == f"{_KEPT}{point.manifest.id}"


HISTORY = "history"
"""Profile of checkpoints that were reduced to their weights."""
_MAX_DELTA_RATIO = 0.85
"""Size of a delta, relative to its keyframe, above which the next checkpoint is a keyframe."""
_HISTORY_KEYFRAME_EVERY = 8


def select_resumable(points: Sequence[P]) -> list[P]:
    """Return the checkpoints from which training can resume."""
    return [point for point in points if point.manifest.profile != HISTORY]


def check_base_options(base: str | None, keyframe_every: int) -> None:
    """Raise `ConfigError` for invalid options of `choose_base`."""
    if type(keyframe_every) is not int or keyframe_every < 1:
        raise ConfigError(f"keyframe_every must be a positive integer, got {keyframe_every!r}")
    if base not in ("auto", "chain", None):
        raise ConfigError(f"base must be 'auto', 'chain' or None, got {base!r}")
    if base == "chain" and keyframe_every > MAX_BASES:
        raise ConfigError(f"keyframe_every must be at most {MAX_BASES} with base='chain'")


def choose_base(
    points: Sequence[Point], mode: str | None, since_keyframe: int, keyframe_every: int
) -> Point | None:
    """Return the base of the next checkpoint, or None if it should be a keyframe.

    `auto` returns the last keyframe, `chain` the last checkpoint. A keyframe is due once every
    `keyframe_every` saves, and with `auto` also when deltas have become too large.
    """
    resumable = select_resumable(points)
    keyframes = [point for point in resumable if point.manifest.base is None]
    if mode is None or not keyframes or since_keyframe + 1 >= keyframe_every:
        return None
    last, keyframe = resumable[-1], keyframes[-1]
    if mode == "chain":
        return last
    is_delta = last.manifest.base is not None
    if is_delta and last.manifest.bytes > _MAX_DELTA_RATIO * keyframe.manifest.bytes:
        return None
    return keyframe


def count_since_keyframe(points: Sequence[RunPoint]) -> int:
    """Return the number of checkpoints after the last keyframe."""
    keyframes = [i for i, point in enumerate(points) if point.manifest.base is None]
    return len(points) - 1 - keyframes[-1] if keyframes else 0


def save_with_base(state: FlatState, path: Path, options: SaveOptions) -> Saved:
    """Save a delta of `options.base`, or in full with a warning if the base cannot be read.

    The same applies to the pretrained model.
    """
    try:
        return save_state(state, path, options)
    except (FormatError, MismatchError) as error:
        if options.base is None and options.pretrained is None:
            raise
        _log.warning("%s: saved in full, because the base cannot be read: %s", path, error)
    if options.base is not None:
        return save_with_base(state, path, replace(options, base=None))
    return save_state(state, path, replace(options, pretrained=None))


def reduce_to_history(
    point: Point,
    points: Sequence[Point],
    *,
    threads: int | None = None,
    pretrained: Pretrained | None = None,
) -> Saved | None:
    """Replace a checkpoint by its weights in bf16, as a delta of an earlier one if there is any.

    The checkpoint is removed once its replacement is complete. Return None if the replacement
    existed already, as after an interruption between both steps.
    """
    path = point.path.with_name(f"{point.name}-{HISTORY}")
    saved, step = None, point.manifest.step
    if not any(other.path == path and other.manifest.step == step for other in points):
        stored = StoredState(point.path, pretrained=pretrained.path if pretrained else None)
        state = FlatState.of(stored.load_state(threads=threads))
        base = _choose_history_base(points)
        options = SaveOptions(
            base.path if base else None, profile=HISTORY, threads=threads, pretrained=pretrained
        )
        saved = save_with_base(state, path, options)
    remove_folder(point.path)
    return saved


def _choose_history_base(points: Sequence[Point]) -> Point | None:
    history = [point for point in points if point.manifest.profile == HISTORY]
    keyframes = [i for i, point in enumerate(history) if point.manifest.base is None]
    if not keyframes or len(history) - keyframes[-1] >= _HISTORY_KEYFRAME_EVERY:
        return None
    return history[keyframes[-1]]
