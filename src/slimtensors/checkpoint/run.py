"""Runs: folders of checkpoints; keyframes, retention, verification and repair."""

import logging
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimtensors import archive
from slimtensors.checkpoint.manifest import (
    MANIFEST,
    STATE,
    CheckpointManifest,
    content_id,
    is_checkpoint,
    read_manifest,
)
from slimtensors.checkpoint.store import FlatState, Saved, StoredState, save_flat
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.storage import StrPath, local_path
from slimtensors.storage.atomic import find_leftovers, lock_folder, remove_folder

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Point:
    """A complete checkpoint of a run."""

    path: Path
    manifest: CheckpointManifest

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.name

    @property
    def order(self) -> tuple[int, str, str]:
        """Sorts the points of a run from the oldest to the newest."""
        step = self.manifest.step
        return (-1 if step is None else step, self.manifest.created, self.name)


def is_run(path: StrPath) -> bool:
    """Tell whether a folder holds checkpoints, and is none itself."""
    folder = Path(path)
    if not folder.is_dir() or is_checkpoint(folder):
        return False
    return any(is_checkpoint(child) for child in folder.iterdir())


def state_file(path: StrPath) -> StrPath:
    """Return the file of tensors if this is the folder of a checkpoint, else the path itself."""
    if isinstance(path, str) and "://" in path:
        return path
    return Path(path) / STATE if is_checkpoint(Path(path)) else path


def points(run: StrPath) -> list[Point]:
    """List the complete checkpoints of a run, the newest last."""
    found = [Point(folder, m) for folder in _folders(local_path(run)) if (m := _manifest(folder))]
    return sorted(found, key=lambda point: point.order)


def find_unreadable(run: StrPath) -> dict[str, str]:
    """Return the folders that contain files of a checkpoint but are not readable as one, and why.

    They may be damaged, or written by a newer version or another program; nothing removes them.
    """
    found = ((folder, _manifest_error(folder)) for folder in _folders(local_path(run)))
    return {folder.name: problem for folder, problem in found if problem}


def find_mentioned(names: Iterable[str], run: Path, among: Sequence[Point]) -> set[str]:
    """Return the points that the `checkpoint.json` of these folders mentions, readable or not.

    One of them may be the base of a checkpoint that can be repaired.
    """
    files = (run / name / MANIFEST for name in names)
    texts = [file.read_bytes() for file in files if file.is_file()]
    return {p.name for p in among if any(f'"{p.name}"'.encode() in text for text in texts)}


def needed(names: Iterable[str], among: Sequence[Point]) -> set[str]:
    """Return these checkpoints and all that they need."""
    known = {point.name: point for point in among}
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found or name not in known:
            continue
        found.add(name)
        base = known[name].manifest.base
        todo += [base.name] if base else []
    return found


def remove_checkpoint(path: StrPath) -> None:
    """Remove a checkpoint, unless another one in its run needs it."""
    folder = local_path(path)
    read_manifest(folder)
    for point in points(folder.parent):
        base = point.manifest.base
        if base is not None and base.name == folder.name:
            raise ConfigError(f"{folder}: {point.name} is a difference from it; flatten that first")
    remove_folder(folder)


@dataclass(frozen=True)
class RunVerification:
    """What `verify_run` found. True if all is well."""

    checkpoints: int
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Checkpoints that cannot be used, and why."""
    incomplete: Sequence[str] = ()
    """Temporary folders of interrupted saves; `repair` removes them."""

    def __bool__(self) -> bool:
        return not self.damaged and not self.incomplete


def verify_run(run: StrPath, *, threads: int | None = None) -> RunVerification:
    """Read every checkpoint of a run, and check all checksums and that all bases are there."""
    folder = local_path(run)
    found = points(folder)
    damaged = {}
    for point in found:
        try:
            problem = _damage(point, threads)
        except (FormatError, MismatchError, OSError) as error:
            problem = str(error)
        if problem:
            damaged[point.name] = problem
    damaged |= find_unreadable(folder)
    return RunVerification(len(found), damaged, [path.name for path in find_leftovers(folder)])


def repair_run(run: StrPath) -> list[str]:
    """Remove temporary folders of interrupted saves, and return their names.

    Everything else stays. Unreadable checkpoints (see `find_unreadable`) are logged as warnings.
    """
    folder = local_path(run)
    with lock_folder(folder):
        return drop_incomplete(folder)


def drop_incomplete(run: Path) -> list[str]:
    """Do what `repair_run` does; the caller must have locked the run."""
    found = find_leftovers(run)
    for path in found:
        shutil.rmtree(path)
    for name, problem in find_unreadable(run).items():
        _log.warning("%s: unreadable checkpoint left as it is: %s", run / name, problem)
    return [path.name for path in found]


def _damage(point: Point, threads: int | None) -> str:
    StoredState(point.path)  # opens its base too
    state = point.path / STATE
    if content_id(state) != point.manifest.id:
        return f"{state}: is not the file that was saved"
    result = archive.verify(state, threads=threads)
    return next(iter(result.damaged.values()), "")


def _folders(run: Path) -> Iterator[Path]:
    if not run.is_dir():
        raise FileNotFoundError(f"{run}: no such folder")
    yield from (p for p in sorted(run.iterdir()) if p.is_dir() and not p.name.startswith("."))


def _manifest(folder: Path) -> CheckpointManifest | None:
    try:
        return read_manifest(folder)
    except (FormatError, IsADirectoryError):
        return None


def _manifest_error(folder: Path) -> str:
    """Return why a folder with files of a checkpoint is not readable, or an empty string."""
    if not any((folder / name).exists() for name in (MANIFEST, STATE)):
        return ""
    try:
        read_manifest(folder)
    except (FormatError, IsADirectoryError) as error:
        return str(error)
    return ""


@dataclass(frozen=True)
class Retention:
    """Keep the last ones, every n-th step and the best; without any of these, all."""

    last: int | None = None
    every: int | None = None
    best: str | None = None
    """The metric by which one is the best."""
    best_is: str = "min"

    def __post_init__(self) -> None:
        for name, value in (("keep_last", self.last), ("keep_every", self.every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ConfigError(f"{name} must be a number from 1, got {value!r}")
        if self.best_is not in ("min", "max"):
            raise ConfigError(f"best_is must be 'min' or 'max', got {self.best_is!r}")

    def kept(self, points: Sequence[Point]) -> set[str]:
        """Return the names to keep, those included that others need. The newest always stays."""
        if self.last is None and self.every is None and self.best is None:
            return {point.name for point in points}
        keep = [point.name for point in points[-(self.last or 1) :]]
        if self.every is not None:
            steps = ((point, point.manifest.step) for point in points)
            keep += [p.name for p, step in steps if step is not None and step % self.every == 0]
        if self.best is not None:
            keep += self._best(points, self.best)
        return needed(keep, points)

    def _best(self, points: Sequence[Point], metric: str) -> list[str]:
        sign = 1 if self.best_is == "min" else -1
        rated = [
            (sign * point.manifest.metrics[metric], point.name)
            for point in points
            if metric in point.manifest.metrics
        ]
        return [min(rated)[1]] if rated else []


HISTORY = "history"
_TOO_LARGE = 0.85
"""A delta that takes more than this of its keyframe is no longer worth needing another file."""
_HISTORY_GROUP = 8


def resumable(points: Sequence[Point]) -> list[Point]:
    """Return the checkpoints that hold all that training needs."""
    return [point for point in points if point.manifest.profile != HISTORY]


def next_base(points: Sequence[Point], how: str | None, since: int, every: int) -> Point | None:
    """Choose the base of the next checkpoint; none if it is to stand alone.

    `auto`: the last one that stands alone, unless there have been `every` saves `since` it or
    deltas have grown too large. `chain`: the last one, as long as the chain is short enough.
    """
    found = resumable(points)
    full = [point for point in found if point.manifest.base is None]
    if how is None or not full or since + 1 >= every:
        return None
    if how == "chain":
        return found[-1]
    is_delta = found[-1].manifest.base is not None
    if is_delta and found[-1].manifest.bytes > _TOO_LARGE * full[-1].manifest.bytes:
        return None
    return full[-1]


def saves_since_keyframe(points: Sequence[Point]) -> int:
    """Count the checkpoints after the last one that stands alone."""
    full = [i for i, point in enumerate(points) if point.manifest.base is None]
    return len(points) - 1 - full[-1] if full else 0


def demote(point: Point, points: Sequence[Point], *, threads: int | None = None) -> Saved:
    """Replace a checkpoint by its weights in bf16, as a difference from another such if there is.

    The small one is complete before the old one goes.
    """
    state = FlatState.of(StoredState(point.path).load_state(threads=threads))
    path = point.path.with_name(f"{point.name}-{HISTORY}")
    base = _history_base(points)
    saved = save_flat(
        state, path, base=base.path if base else None, profile=HISTORY, threads=threads
    )
    remove_folder(point.path)
    return saved


def _history_base(points: Sequence[Point]) -> Point | None:
    found = [point for point in points if point.manifest.profile == HISTORY]
    alone = [i for i, point in enumerate(found) if point.manifest.base is None]
    if not alone or len(found) - alone[-1] >= _HISTORY_GROUP:
        return None
    return found[alone[-1]]
