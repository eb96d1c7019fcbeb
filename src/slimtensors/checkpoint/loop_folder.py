"""The folder of a training loop: where to save, from which base, and what to remove."""

import itertools
import logging
import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from slimtensors.checkpoint.integrity import RunIntegrity, set_aside
from slimtensors.checkpoint.run import (
    HISTORY,
    Point,
    Retention,
    choose_base,
    count_since_keyframe,
    find_mentioned,
    find_unreadable,
    include_bases,
    list_checkpoints,
    reduce_to_history,
    select_resumable,
)
from slimtensors.checkpoint.store import Saved, StoredState
from slimtensors.errors import FormatError, MismatchError
from slimtensors.storage.atomic import remove_folder

_log = logging.getLogger(__name__)


class LoopFolder:
    """The checkpoints of a loop in a run that it has locked. Damaged ones never count."""

    def __init__(self, run: Path, name: str, *, threads: int | None = None) -> None:
        self.run = run
        self.integrity = RunIntegrity(run, threads=threads)
        self._name, self._threads = name, threads
        self._since_keyframe = 0
        """Number of saves since the last keyframe."""
        self._metrics: dict[str, dict[str, float]] = {}
        """Metrics in the states of checkpoints of format version 1, by id."""

    def is_own(self, point: Point) -> bool:
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

    def count_since_keyframe(self, points: Sequence[Point]) -> None:
        """Continue after these checkpoints."""
        self._since_keyframe = count_since_keyframe(points)

    def count_save(self, saved: Saved) -> None:
        """Count a new checkpoint."""
        self._since_keyframe = self._since_keyframe + 1 if saved.manifest.base else 0

    def choose_base(self, mode: str | None, keyframe_every: int) -> Point | None:
        """Return the base of the next checkpoint, or None if it should be saved in full."""
        base = choose_base(self.list_own(), mode, self._since_keyframe, keyframe_every)
        return base if base is not None and self.integrity.is_intact(base) else None

    def choose_path(self, step: int) -> Path:
        """Return the folder to save a step to.

        A damaged checkpoint of that name is renamed. Anything else stays; if it is not a
        checkpoint of this program, the new one gets a suffix.
        """
        path = self.run / self._name.format(step)
        if problem := self.integrity.find_damage(path):
            set_aside(path, problem)
        if not _is_taken(path) or any(path == point.path for point in list_checkpoints(self.run)):
            return path  # saving raises if an intact checkpoint has this name
        names = (f"{path.name}-{i}" for i in itertools.count(2))
        free = next(self.run / name for name in names if not _is_taken(self.run / name))
        _log.warning("%s was not written by this version; saving to %s", path, free.name)
        return free

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
            reduce_to_history(point, list_checkpoints(self.run), threads=self._threads)
        except (FormatError, MismatchError) as error:
            _log.warning("%s: unusable checkpoint left as it is: %s", point.path, error)
            self.integrity.record(point, str(error))
            return False
        return True


def _is_taken(path: Path) -> bool:
    """Return True if a path is anything but free or an empty folder."""
    if path.is_symlink() or not path.is_dir():
        return os.path.lexists(path)
    return any(path.iterdir())
