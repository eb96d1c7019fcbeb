"""Keep sources: a target must not be a source, be inside of it, or contain it."""

import os
from collections.abc import Iterable
from pathlib import Path

from slimtensors.errors import ConfigError
from slimtensors.storage.files import StrPath
from slimtensors.storage.location import LocalLocation, Location, RemoteLocation

_LOCAL = ("file://", "local://")
_INDEX = ".index.json"


def check_separate(target: Location, sources: Iterable[StrPath]) -> None:
    """Raise `ConfigError` if writing `target` would touch one of the `sources`.

    Local paths are compared by device and inode, which also finds links and other spellings. An
    index stands for its folder.
    """
    for source in sources:
        problem = _compare(target, source)
        if problem:
            raise ConfigError(f"{target} {problem} the source {source}; choose another target")


def _compare(target: Location, source: StrPath) -> str:
    """Return how the target relates to the source; empty if they are separate."""
    written, read = _local_target(target), _local_source(source)
    if written is not None and read is not None:
        return _compare_local(written, read)
    if isinstance(target, RemoteLocation):
        text = str(source)
        if target.is_inside(text.rpartition("/")[0] if text.endswith(_INDEX) else text):
            return "is inside"
        return "is or contains" if target.contains(source) else ""
    return ""


def _compare_local(target: Path, source: Path) -> str:
    read, written = _identity(source), _identity(target)
    if read is None:
        return ""
    if read == written:
        return "is the same as"
    if read in map(_identity, Path(os.path.realpath(target)).parents):
        return "is inside"
    if written is not None and written in map(_identity, Path(os.path.realpath(source)).parents):
        return "contains"
    return ""


def _identity(path: Path) -> tuple[int, int] | None:
    """Return device and inode, or None if the path cannot be found."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _local_target(target: Location) -> Path | None:
    if isinstance(target, LocalLocation):
        return target.path
    return Path(target.path) if isinstance(target, RemoteLocation) and _is_local(target) else None


def _local_source(source: StrPath) -> Path | None:
    text = os.fspath(source)
    if isinstance(source, str) and "://" in source:
        if not source.startswith(_LOCAL):
            return None
        text = source.partition("://")[2]
    path = Path(text)
    return path.parent if path.name.endswith(_INDEX) else path


def _is_local(target: RemoteLocation) -> bool:
    return str(target).startswith(_LOCAL)
