"""Atomic replacement of files and folders: temporary names, fsync, rename, locks, leftovers."""

import ctypes
import errno
import fcntl
import glob
import hashlib
import os
import platform
import secrets
import shutil
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from slimtensors.errors import ConfigError, InUseError
from slimtensors.storage.location import StrPath, local_path

TEMPORARY_SUFFIX = ".slimtensors-tmp"
"""How the names end of what is not complete, or no longer."""

REPLACED_SUFFIX = ".slimtensors-old"
"""How the name ends of a folder that makes room for another, where that takes two steps."""

_LONGEST = 200
"""Bytes of a target's name that its hidden names repeat: they are longer, and may have 255."""


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Give a folder beside `target` to fill, which goes at the end if it has got no other name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    folder, lock = create_temporary(target, Path.mkdir)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def create_temporary(target: Path, make: Callable[[Path], object]) -> tuple[Path, int]:
    """Make a file or a folder beside `target`.

    Returns also the descriptor that locks it, to close when it has got its name or is gone.
    """
    while True:
        path = temporary_name(target)
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


def remove_leftovers(target: Path) -> None:
    """Remove what writers of `target` have left that were killed; what has a writer stays.

    So does what another machine has made: not every shared disk tells one of the other's locks.
    """
    for mark in (TEMPORARY_SUFFIX, REPLACED_SUFFIX):
        for path in target.parent.glob(glob.escape(_stem(target)) + "[0-9a-f]" * 8 + mark):
            if mark == REPLACED_SUFFIX and not target.exists():  # then the old one is all there is
                continue
            with suppress(OSError):  # it has a writer, or is gone, or may not be removed
                _remove_unlocked(path)


def temporary_name(path: Path, mark: str = TEMPORARY_SUFFIX) -> Path:
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
        gone = temporary_name(old, REPLACED_SUFFIX)
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


_FILE = ".lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; raise `InUseError` if another process has it."""
    with (folder / _FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise InUseError(f"{folder}: process {owner} is writing there") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


@contextmanager
def replace_with_folder(path: StrPath, *sources: StrPath, replace: bool) -> Iterator[Path]:
    """Give a folder to fill, which takes the place of `path` at the end, or disappears."""
    target = Path(os.path.realpath(local_path(path)))
    check_replaceable(target, sources, replace=replace)
    with temporary_folder(target) as folder:
        yield folder
        move_into_place(folder, target)


def move_into_place(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`; what was there goes when the new one is in place."""
    sync_folder(folder)
    if target.exists():
        replace_folder(folder, target)
    else:
        folder.rename(target)
        sync_folder(target.parent)


def check_replaceable(target: Path, sources: Sequence[StrPath], *, replace: bool) -> None:
    """Raise if there is something that nobody wants destroyed."""
    if not target.exists():
        return
    if not replace:
        raise ConfigError(f"{target}: exists already; pass replace=True")
    if not target.is_dir():
        raise ConfigError(f"{target}: is a file, not a folder")
    paths = [Path(os.path.realpath(source)) for source in sources]
    if any(target in (path if path.is_dir() else path.parent).parents for path in paths):
        raise ConfigError(f"{target}: holds the source's folder and cannot be replaced")
    if any(target.iterdir()) and not any(target.rglob("*.safetensors")):
        raise ConfigError(f"{target}: holds files, but no model, and is not replaced")


@contextmanager
def create_folder(path: StrPath) -> Iterator[Path]:
    """Give a folder to fill, which takes the name `path` at the end, or disappears.

    An empty folder may be there already; a checkpoint is never written over another one.
    """
    target = Path(os.path.realpath(local_path(path)))
    check_absent(target)
    with temporary_folder(target) as folder:
        try:
            yield folder
            commit_folder(folder, target)
        except OSError as error:
            if error.filename is None:  # a full disk, for one: writing names no file
                error.filename = str(target)
            raise


def commit_folder(folder: Path, target: Path) -> None:
    """Give a complete folder its name, which none but an empty folder may have."""
    sync_folder(folder)
    try:
        folder.rename(target)  # over an empty folder too, in one step
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise ConfigError(f"{target}: somebody else has saved there meanwhile") from error
    sync_folder(target.parent)


def write_file(path: Path, raw: bytes) -> None:
    """Write a small file and make sure that it is on the disk."""
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def remove_folder(path: Path) -> None:
    """Remove a folder: it loses its name in one step, then its content."""
    gone = temporary_name(path)
    path.rename(gone)
    sync_folder(path.parent)
    shutil.rmtree(gone)


def find_leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders of interrupted saves and removals."""
    found = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(p for p in found if p.name.startswith(".") and p.name.endswith(TEMPORARY_SUFFIX))


def check_absent(target: Path) -> None:
    """Raise unless a folder of this name may be made: nothing is there, or an empty one."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target}: is a file; a checkpoint needs a folder of its own")
    found = next(target.iterdir(), None)
    if found is not None:
        raise ConfigError(f"{target}: holds {found.name}; a checkpoint is never written over")
