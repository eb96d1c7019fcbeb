"""Hidden names beside a target for what is not complete, each locked while its writer lives."""

import ctypes
import fcntl
import glob
import hashlib
import os
import platform
import secrets
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

MARK = ".slimtensors-tmp"
"""How the names end of what is not complete, or no longer."""

OLD = ".slimtensors-old"
"""How the name ends of a folder that makes room for another, where that takes two steps."""

_LONGEST = 200
"""Bytes of a target's name that its hidden names repeat: they are longer, and may have 255."""


@contextmanager
def hidden_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside `target` to fill, which goes at the end if it has got no other name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned(target)
    folder, lock = make_hidden(target, Path.mkdir)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def make_hidden(target: Path, make: Callable[[Path], object]) -> tuple[Path, int]:
    """Make a file or a folder beside `target`.

    Returns also the descriptor that locks it, to close when it has got its name or is gone.
    """
    while True:
        path = hidden_name(target)
        make(path)
        try:
            lock = _opened(path)
        except FileNotFoundError:  # another process has taken it for abandoned
            continue
        with suppress(OSError):  # without locks, it is never taken for abandoned
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # else another process has removed it before it was locked
            return path, lock
        os.close(lock)


def remove_abandoned(target: Path) -> None:
    """Remove what writers of `target` have left that were killed; what has a writer stays.

    So does what another machine has made: not every shared disk tells one of the other's locks.
    """
    for mark in (MARK, OLD):
        for path in target.parent.glob(glob.escape(_stem(target)) + "[0-9a-f]" * 8 + mark):
            if mark == OLD and not target.exists():  # then the old one is all there is
                continue
            with suppress(OSError):  # it has a writer, or is gone, or may not be removed
                _remove_unlocked(path)


def hidden_name(path: Path, mark: str = MARK) -> Path:
    """Return a new hidden name beside `path`."""
    return path.with_name(f"{_stem(path)}{secrets.token_hex(4)}{mark}")


def replace_folder(new: Path, old: Path) -> None:
    """Give a complete folder the name of another one, which then goes.

    In one step where the file system can. Elsewhere a process that is killed between two may leave
    the old one under a hidden name that ends in `OLD`, where it stays until a save that finds
    the name taken again.
    """
    gone = new
    if not _exchange(new, old):
        gone = hidden_name(old, OLD)
        try:
            old.rename(gone)
            new.rename(old)
        except BaseException:
            if gone.exists() and not old.exists():
                gone.rename(old)
            raise
    sync_folder(old.parent)
    shutil.rmtree(gone, ignore_errors=True)  # what cannot go now goes with the next save


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stem(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_LONGEST])}.{_here()}"


@cache
def _here() -> str:
    """Return a few characters that stand for this machine."""
    name = f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]


def _opened(path: Path) -> int:
    """Open for a lock, which network file systems give only to who may write."""
    return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)


def _remove_unlocked(path: Path) -> None:
    descriptor = _opened(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Give two folders each other's names in one step; tell whether the system could."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), both) == 0
