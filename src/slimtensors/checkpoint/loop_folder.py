"""The folder of a training loop: which checkpoints are intact, where to save, what to remove."""

import itertools
import json
import logging
import os
import re
import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slimtensors.archive import Archive
from slimtensors.archive.dialects.entries import KEY
from slimtensors.checkpoint.documents import read_document
from slimtensors.checkpoint.manifest import FORMAT, MANIFEST, read_manifest
from slimtensors.checkpoint.pretrained import Pretrained
from slimtensors.checkpoint.run import (
    DAMAGED,
    HISTORY,
    Point,
    Retention,
    RunPoint,
    choose_base,
    count_since_keyframe,
    find_bases,
    find_mentioned,
    find_unreadable,
    include_bases,
    list_checkpoints,
    reduce_to_history,
    select_resumable,
)
from slimtensors.checkpoint.store import STATE, Saved, StoredState
from slimtensors.errors import FormatError, MismatchError, UnsupportedVersionError, describe_error
from slimtensors.parallel import Workers
from slimtensors.storage import LocalLocation, StrPath, open_file
from slimtensors.storage.atomic import remove_folder, sync_folder, sync_tree
from slimtensors.storage.files import link_or_copy

_log = logging.getLogger(__name__)

EARLIER = "earlier-run-"
"""Prefix of folders with the later checkpoints of a run that was resumed at an earlier step."""


class RunIntegrity:
    """Results of reading the checkpoints of a locked run, each of them once per process."""

    def __init__(
        self, run: Path, *, threads: int | None = None, pretrained: StrPath | None = None
    ) -> None:
        self._run, self._threads = run, threads
        self.pretrained = pretrained
        """Path of the pretrained model of its checkpoints; by default it is searched."""
        self._problems: dict[tuple[str, str], str] = {}
        """Folder name and id -> why the checkpoint is unusable, empty if it is intact."""

    def record(self, point: RunPoint, problem: str = "") -> None:
        """Record that a checkpoint was read entirely, or why that failed."""
        self._problems[_key(point)] = problem

    def forget(self, point: RunPoint) -> None:
        """Read a checkpoint again when it is used next."""
        self._problems.pop(_key(point), None)

    def is_damaged(self, point: Point) -> bool:
        """Return True if a checkpoint is known to be unusable; read nothing."""
        return bool(self._problems.get(_key(point)))

    def is_intact(self, point: Point) -> bool:
        """Read a checkpoint and its bases if necessary; return True if all checksums match."""
        return not self.find_problem(point)

    def find_problem(self, point: Point) -> str:
        """Return why a checkpoint is unusable, or an empty string if it is intact."""
        if _key(point) not in self._problems:
            try:
                problem = self._verify(point)
            except (FormatError, MismatchError, OSError) as error:
                problem = describe_error(error)
            if problem:
                _log.warning("%s: unusable checkpoint left as it is: %s", point.path, problem)
            self.record(point, problem)
        return self._problems[_key(point)]

    def find_damage(self, folder: Path) -> str:
        """Return why a folder that was provably a checkpoint is unusable, else an empty string.

        Folders of other programs and of newer versions are not damaged.
        """
        if folder.is_symlink():
            return ""
        try:
            return self.find_problem(Point(folder, read_manifest(folder)))
        except UnsupportedVersionError:
            return ""
        except FormatError as error:
            return str(error) if is_ours(folder) else ""
        except OSError:
            return ""

    def _verify(self, point: Point) -> str:
        stored = StoredState(point.path, pretrained=self.pretrained)  # checks ids and bases
        stored.find_pretrained()
        with Archive(point.path / STATE) as archive, Workers(self._threads) as workers:

            def check(name: str) -> None:
                if archive.read_encoded(name, workers.each) is None:
                    archive.load_one(name, workers.each)

            shared = {**archive.tied(), **archive.copies()}
            names = [name for name in archive if name not in shared]
            deque(workers.in_order(check, names, archive.stored_bytes), maxlen=0)
        base = point.manifest.base
        if base is None:
            return ""
        found = next((p for p in list_checkpoints(self._run) if p.name == base.name), None)
        if found is None:
            return f"{point.path}: base {base.name} not found"
        problem = self.find_problem(found)
        return f"{point.path}: damaged base: {problem}" if problem else ""


def _key(point: RunPoint) -> tuple[str, str]:
    return point.name, point.manifest.id


def is_ours(folder: Path) -> bool:
    """Return True if a folder was provably written as a checkpoint, whatever its state is now."""
    try:
        text = read_document(folder / MANIFEST)
        if f'"{FORMAT}"' in text:
            return True
        json.loads(text)
    except (ValueError, RecursionError, OSError):
        try:  # no manifest of anybody: the tensors decide
            return KEY in open_file(LocalLocation(folder / STATE)).header.metadata
        except (FormatError, OSError):
            return False
    return False


def set_aside(folder: Path, problem: str) -> Path:
    """Rename a damaged checkpoint, so that its step can be saved again; return the new path."""
    names = itertools.chain([""], (f"-{i}" for i in itertools.count(2)))
    paths = (folder.with_name(f"{DAMAGED}{folder.name}{suffix}") for suffix in names)
    target = next(path for path in paths if not os.path.lexists(path))
    folder.rename(target)
    sync_folder(folder.parent)
    _log.warning("%s: damaged checkpoint renamed to %s: %s", folder, target.name, problem)
    return target


class LoopFolder:
    """The checkpoints of a loop in a run that it has locked. Damaged ones never count."""

    def __init__(
        self,
        run: Path,
        name: str,
        *,
        threads: int | None = None,
        pretrained: Pretrained | None = None,
    ) -> None:
        self.run = run
        self.integrity = RunIntegrity(run, threads=threads)
        self.use_pretrained(pretrained)
        self._name, self._threads = name, threads
        self._since_keyframe = 0
        """Number of saves since the last keyframe."""
        self._metrics: dict[str, dict[str, float]] = {}
        """Metrics in the states of checkpoints of format version 1, by id."""

    def use_pretrained(self, pretrained: Pretrained | None) -> None:
        """Use the pretrained model of the loop for all checkpoints."""
        self._pretrained = pretrained
        self.integrity.pretrained = pretrained.path if pretrained is not None else None

    def is_own(self, point: RunPoint) -> bool:
        """Return True if a folder has the name that this loop gives to its step."""
        step = point.manifest.step
        if step is None or point.path.is_symlink():
            return False
        return bool(re.fullmatch(re.escape(self._name.format(step)) + r"(-\d+)?", point.name))

    def list_own(self) -> list[Point]:
        """Return the resumable checkpoints of this loop that are not known to be damaged."""
        return [
            point
            for point in select_resumable(list_checkpoints(self.run))
            if self.is_own(point) and not self.integrity.is_damaged(point)
        ]

    def count_since_keyframe(self, points: Sequence[RunPoint]) -> None:
        """Continue after these checkpoints."""
        self._since_keyframe = count_since_keyframe(points)

    def count_save(self, saved: Saved) -> None:
        """Count a new checkpoint."""
        self._since_keyframe = self._since_keyframe + 1 if saved.manifest.base else 0

    def choose_base(self, mode: str | None, keyframe_every: int) -> Point | None:
        """Return the base of the next checkpoint, or None if it should be saved in full."""
        base = choose_base(self.list_own(), mode, self._since_keyframe, keyframe_every)
        return base if base is not None and self.integrity.is_intact(base) else None

    def choose_path(self, step: int, *, merge: bool = False) -> Path:
        """Return the folder to save a step to.

        A damaged checkpoint of that name is renamed. Anything else stays; if it is not a
        checkpoint of this program, the new one gets a suffix. With `merge`, a folder without a
        model is returned as it is.
        """
        path = self.run / self._name.format(step)
        if problem := self.integrity.find_damage(path):
            set_aside(path, problem)
        if not _is_taken(path) or any(path == point.path for point in list_checkpoints(self.run)):
            return path  # saving raises if an intact checkpoint has this name
        # Checked last: a callback of the training thread may have just created the folder.
        if merge and path.is_dir() and not path.is_symlink() and not _contains_model(path):
            return path
        names = (f"{path.name}-{i}" for i in itertools.count(2))
        free = next(self.run / name for name in names if not _is_taken(self.run / name))
        _log.warning("%s was not written by this version; saving to %s", path, free.name)
        return free

    def set_newer_aside(self, step: int, *, saving: int) -> None:
        """Move the checkpoints after a step, of whichever program, to a folder `earlier-run-1`.

        Bases that they need are linked or copied there first, so that all of them can be read. The
        folder of the step that is being saved stays unless it contains a model.
        """
        newer = [path for path in self.run.iterdir() if self._parse_step(path) > step]
        new = self.run / self._name.format(saving)
        newer = [path for path in newer if path != new or _contains_model(path)]
        if not newer:
            return
        points = list_checkpoints(self.run)
        bases = {base for path in newer for base in find_bases(path.name, points)}
        targets = (self.run / f"{EARLIER}{i}" for i in itertools.count(1))
        target = next(path for path in targets if not os.path.lexists(path))
        target.mkdir()
        for name in sorted(bases):
            shutil.copytree(self.run / name, target / name, copy_function=link_or_copy)
        sync_tree(target)  # before the originals are removed
        # Newest first: whenever this is interrupted, all deltas are still next to their bases.
        for path in sorted(newer, key=self._parse_step, reverse=True):
            if path.name in bases:
                remove_folder(path)
            else:
                path.rename(target / path.name)
        sync_folder(target)
        sync_folder(self.run)
        names = ", ".join(sorted(path.name for path in newer))
        _log.warning(
            "%s: checkpoints of an earlier run moved to %s: %s", self.run, target.name, names
        )

    def _parse_step(self, path: Path) -> int:
        """Return the step of a folder by its name, or -1 if the loop gives no such names."""
        prefix = self._name.partition("{")[0]
        found = re.fullmatch(re.escape(prefix) + r"(\d+)(-\d+)?", path.name)
        is_folder = path.is_dir() and not path.is_symlink()
        return int(found[1]) if found and is_folder else -1

    def apply_retention(self, retention: Retention, *, keep_history: bool) -> None:
        """Remove the checkpoints that no rule keeps, if a kept one was verified by reading."""
        own = self.list_own()
        if len(retention.select(own)) == len(own):
            return  # nothing to remove, nothing to read
        if retention.best is not None:
            own = [self._complete_metrics(point, retention.best) for point in own]
        keep = retention.select(own, self.integrity.is_intact)
        if not any(point.name in keep and self.integrity.is_intact(point) for point in own):
            _log.warning("%s: no intact checkpoint; nothing is removed", self.run)
            return
        points = list_checkpoints(self.run)
        own = self.list_own()  # without those just found damaged
        others = {point.name for point in points} - {point.name for point in own}
        others |= find_mentioned(find_unreadable(self.run), self.run, points)
        keep |= include_bases(others, points)
        # Newest first: a delta is removed before its base, so that none is left without a base.
        for point in reversed(own):
            if point.name in keep:
                continue
            if not keep_history:
                remove_folder(point.path)
            elif not self._reduce(point):
                keep |= include_bases([point.name], points)

    def _complete_metrics(self, point: Point, metric: str) -> Point:
        """Return a checkpoint with all its metrics; format version 1 may lack tensors."""
        if point.manifest.is_sealed or metric in point.manifest.metrics:
            return point
        if point.manifest.id not in self._metrics:
            try:
                self._metrics[point.manifest.id] = StoredState(point.path).load_metrics()
            except (FormatError, MismatchError):
                self._metrics[point.manifest.id] = {}  # damaged: does not count anyway
        metrics = {**self._metrics[point.manifest.id], **point.manifest.metrics}
        return replace(point, manifest=replace(point.manifest, metrics=metrics))

    def _reduce(self, point: Point) -> bool:
        """Reduce a checkpoint to its weights; return False if it is damaged."""
        history = point.path.with_name(f"{point.name}-{HISTORY}")
        if problem := self.integrity.find_damage(history):
            set_aside(history, problem)
        try:
            reduce_to_history(
                point,
                list_checkpoints(self.run),
                threads=self._threads,
                pretrained=self._pretrained,
            )
        except (FormatError, MismatchError) as error:
            _log.warning("%s: unusable checkpoint left as it is: %s", point.path, error)
            self.integrity.record(point, str(error))
            return False
        return True


def _contains_model(folder: Path) -> bool:
    """Return True for a checkpoint, of this program or of another one that uses the same names."""
    names = (STATE, "model*.safetensors*", "pytorch_model*.bin*")
    return any(found for name in names for found in folder.glob(name))


def _is_taken(path: Path) -> bool:
    """Return True if a path is anything but free or an empty folder."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return any(path.iterdir())
