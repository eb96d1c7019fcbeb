"""Runs: folders of checkpoints, of which some need others."""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from slimtensors import archive
from slimtensors.checkpoint.commit import leftovers, remove_folder
from slimtensors.checkpoint.manifest import (
    STATE,
    Manifest,
    content_id,
    is_checkpoint,
    read_manifest,
)
from slimtensors.checkpoint.reading import StoredState
from slimtensors.container import StrPath, local
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.lock import locked


@dataclass(frozen=True)
class Point:
    """A complete checkpoint of a run."""

    path: Path
    manifest: Manifest

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
    found = [Point(folder, m) for folder in _folders(local(run)) if (m := _manifest(folder))]
    return sorted(found, key=lambda point: point.order)


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
    folder = local(path)
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
    """Folders that interrupted saves have left; `repair` removes them."""

    def __bool__(self) -> bool:
        return not self.damaged and not self.incomplete


def verify_run(run: StrPath, *, threads: int | None = None) -> RunVerification:
    """Read every checkpoint of a run, and check all checksums and that all bases are there."""
    folder = local(run)
    found = points(folder)
    damaged = {}
    for point in found:
        try:
            problem = _damage(point, threads)
        except (FormatError, MismatchError, OSError) as error:
            problem = str(error)
        if problem:
            damaged[point.name] = problem
    return RunVerification(len(found), damaged, [path.name for path in _incomplete(folder)])


def repair_run(run: StrPath) -> list[str]:
    """Remove what interrupted saves have left, and return the names; damaged ones stay."""
    folder = local(run)
    with locked(folder):
        return drop_incomplete(folder)


def drop_incomplete(run: Path) -> list[str]:
    """Do what `repair_run` does, for whoever holds the lock already."""
    found = list(_incomplete(run))
    for path in found:
        shutil.rmtree(path)
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


def _manifest(folder: Path) -> Manifest | None:
    try:
        return read_manifest(folder)
    except FormatError:
        return None


def _incomplete(run: Path) -> Iterator[Path]:
    """Yield temporary folders, and those with tensors that no description makes a checkpoint."""
    yield from leftovers(run)
    for folder in _folders(run):
        if (folder / STATE).exists() and _manifest(folder) is None:
            yield folder
