"""Atomic replacement of files and folders: temporary names, fsync, rename, locks, leftovers.

A file or folder is written under a temporary name beside its target and renamed when it is
complete. Temporary names are hidden and end in `TEMPORARY_SUFFIX`; their writers lock them, so
that leftovers of killed processes can be recognized and removed by the next write.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
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
from slimtensors.tensor import Json

TEMPORARY_SUFFIX = ".slimtensors-tmp"
"""Suffix of names that are being written or removed."""

REPLACED_SUFFIX = ".slimtensors-old"
"""Suffix of a folder that is being replaced, on file systems where that takes two steps."""

_MAX_NAME = 200
"""Bytes of the target's name in temporary names, which must not exceed 255 bytes in total."""


def write_file_atomically(path: Path, data: bytes) -> None:
    """Write a small file that appears complete or not at all, and sync it to disk."""
    temporary = path.with_name(f".{path.name}{TEMPORARY_SUFFIX}")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_json(path: Path, data: Json) -> None:
    """Write a JSON file that appears complete or not at all."""
    write_file_atomically(path, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def create_folder(
    path: StrPath, *, replace: bool = False, sources: Sequence[StrPath] = ()
) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and removed on failure.

    Without `replace`, nothing but an empty folder may exist there. With it, a model folder is
    replaced, unless it contains one of `sources`.
    """
    target = Path(os.path.realpath(local_path(path)))
    if replace:
        check_replaceable(target, sources, replace=True)
    else:
        check_absent(target)
    with temporary_folder(target) as folder:
        try:
            yield folder
            commit_folder(folder, target, replace=replace)
        except OSError as error:
            if error.filename is None:  # such as a full disk: write errors have no file name
                error.filename = str(target)
            raise


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, and remove it at the end unless it was renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    folder, lock = create_temporary(target, Path.mkdir)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def commit_folder(folder: Path, target: Path, *, replace: bool = False) -> None:
    """Rename a complete folder to `target`, over an empty folder or, with `replace`, any folder."""
    sync_folder(folder)
    if replace and target.exists():
        replace_folder(folder, target)
        return
    try:
        folder.rename(target)  # replaces an empty folder, in one step
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise ConfigError(f"{target} was written by another process in the meantime") from error
    sync_folder(target.parent)


def replace_folder(new: Path, old: Path) -> None:
    """Rename the complete folder `new` to `old`, and remove the previous content of `old`.

    This is one step where the file system supports exchanging names. Elsewhere, a process that is
    killed between two steps leaves the old folder under a hidden name that ends in
    `REPLACED_SUFFIX`. It is removed by a later write, once a folder with the name exists again.
    """
    obsolete = new
    if not _exchange(new, old):
        obsolete = temporary_name(old, REPLACED_SUFFIX)
        try:
            old.rename(obsolete)
            new.rename(old)
        except BaseException:
            if obsolete.exists() and not old.exists():
                obsolete.rename(old)
            raise
    sync_folder(old.parent)
    shutil.rmtree(obsolete, ignore_errors=True)  # leftovers are removed by the next write


def remove_folder(path: Path) -> None:
    """Remove a folder: rename it in one step, then remove its content."""
    obsolete = temporary_name(path)
    path.rename(obsolete)
    sync_folder(path.parent)
    shutil.rmtree(obsolete)


def check_absent(target: Path) -> None:
    """Raise unless `target` does not exist or is an empty folder."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder")
    found = next(target.iterdir(), None)
    if found is not None:
        raise ConfigError(f"{target} already exists and is not empty (contains {found.name})")


def check_replaceable(target: Path, sources: Sequence[StrPath], *, replace: bool) -> None:
    """Raise unless `target` is absent or, with `replace`, a model folder without the sources."""
    if not target.exists():
        return
    if not replace:
        raise ConfigError(f"{target} already exists; pass replace=True")
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder")
    paths = [Path(os.path.realpath(source)) for source in sources]
    if any(target in (path if path.is_dir() else path.parent).parents for path in paths):
        raise ConfigError(f"{target} contains the source and cannot be replaced")
    if any(target.iterdir()) and not any(target.rglob("*.safetensors")):
        raise ConfigError(f"{target} contains files but no model, and is not replaced")


def create_temporary(target: Path, create: Callable[[Path], object]) -> tuple[Path, int]:
    """Create a file or folder with a temporary name beside `target`, and lock it.

    Return its path and the descriptor of the lock, to be closed after it was renamed or removed.
    """
    while True:
        path = temporary_name(target)
        create(path)
        try:
            lock = _open_for_lock(path)
        except FileNotFoundError:  # another process removed it as a leftover
            continue
        with suppress(OSError):  # without locks, nothing is removed as a leftover
            fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # else another process removed it before it was locked
            return path, lock
        os.close(lock)


def temporary_name(path: Path, suffix: str = TEMPORARY_SUFFIX) -> Path:
    """Return a new hidden name beside `path`."""
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}{suffix}")


def remove_leftovers(target: Path) -> None:
    """Remove the temporary files and folders that killed writers of `target` left behind.

    Those of running writers are locked and stay. So do those of other machines, because not every
    shared file system has locks between machines.
    """
    for suffix in (TEMPORARY_SUFFIX, REPLACED_SUFFIX):
        for path in target.parent.glob(glob.escape(_prefix(target)) + "[0-9a-f]" * 8 + suffix):
            if suffix == REPLACED_SUFFIX and not target.exists():  # it is the only complete folder
                continue
            with suppress(OSError):  # locked, already removed, or not permitted
                _remove_unlocked(path)


def find_leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders of interrupted writes and removals in `folder`."""
    found = (path for path in folder.iterdir() if path.is_dir() and not path.is_symlink())
    return sorted(p for p in found if p.name.startswith(".") and p.name.endswith(TEMPORARY_SUFFIX))


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder; raise `InUseError` if another process has locked it."""
    with (folder / ".lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            owner = file.read().strip() or "unknown"
            raise InUseError(f"{folder}: in use by process {owner}") from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_MAX_NAME])}.{_machine_id()}"


@cache
def _machine_id() -> str:
    """Return 8 hexadecimal digits that identify this machine."""
    name = f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]


def _open_for_lock(path: Path) -> int:
    """Open a file for writing, which network file systems require for a lock, or a folder."""
    return os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)


def _remove_unlocked(path: Path) -> None:
    descriptor = _open_for_lock(path)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two folders in one step; return False if that is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename is None:
        return False
    return bool(rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0)
