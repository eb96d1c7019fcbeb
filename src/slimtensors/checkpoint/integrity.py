"""Integrity of the checkpoints of a run: verified by reading, once per process."""

import itertools
import json
import logging
import os
from collections import deque
from pathlib import Path

from slimtensors.archive import Archive
from slimtensors.archive.dialects.entries import KEY
from slimtensors.checkpoint.documents import read_document
from slimtensors.checkpoint.manifest import FORMAT, MANIFEST, read_manifest
from slimtensors.checkpoint.run import DAMAGED, Point, list_checkpoints
from slimtensors.checkpoint.store import STATE, StoredState
from slimtensors.errors import FormatError, MismatchError, UnsupportedVersionError
from slimtensors.parallel import Workers
from slimtensors.storage import LocalLocation, open_file
from slimtensors.storage.atomic import sync_folder

_log = logging.getLogger(__name__)


class RunIntegrity:
    """What a process knows of the checkpoints of a run that it has locked."""

    def __init__(self, run: Path, *, threads: int | None = None) -> None:
        self._run, self._threads = run, threads
        self._problems: dict[tuple[str, str], str] = {}
        """Folder name and id -> why the checkpoint is unusable, empty if it is intact."""

    def record(self, point: Point, problem: str = "") -> None:
        """Record that a checkpoint was read entirely, or why that failed."""
        self._problems[_key(point)] = problem

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
                problem = str(error)
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
        StoredState(point.path)  # checks ids, bases and entries
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


def _key(point: Point) -> tuple[str, str]:
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
