"""Atomic replacement of files and folders: temporary names, fsync, rename, locks, leftovers.

A file or folder is written under a temporary name beside its target and renamed when it is
complete. Temporary names are hidden, unique, and end in `TEMPORARY_SUFFIX`; their writers lock
them, so that leftovers of killed processes can be recognized and removed by the next write.
Nothing is created, locked or removed through a link.

New files and folders have the mode that the umask permits, replaced ones keep theirs.
"""

import ctypes
import errno
import fcntl
import glob
import hashlib
import json
import os
import platform
import re
import secrets
import shutil
import stat
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from slimtensors.errors import ConfigError, InUseError
from slimtensors.storage.files import (
    TEMPORARY_SUFFIX,
    StrPath,
    copy_file,
    create_file,
    link_or_copy,
    name_write_errors,
)
from slimtensors.storage.location import LocalLocation, local_path
from slimtensors.storage.separate import check_separate
from slimtensors.tensor import Json

REPLACED_SUFFIX = ".slimtensors-old"
"""Suffix of a folder that is being replaced, on file systems where that takes two steps."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_LOCK = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_PID_BYTES = 20

_LEFTOVER = re.compile(rf"\..+\.[0-9a-f]{{16}}{re.escape(TEMPORARY_SUFFIX)}", re.DOTALL)
"""Names of temporary files and folders."""

_MAX_NAME = 200
"""Bytes of the target's name in temporary names, which must not exceed 255 bytes in total."""


def write_file_atomically(path: Path, data: bytes) -> None:
    """Write a small file that appears complete or not at all, and sync it to disk."""
    with temporary_file(path) as (temporary, descriptor):
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
            file.flush()
            os.fsync(descriptor)
        replace_file(temporary, path)
    sync_folder(path.parent)


def copy_file_atomically(source: Path, path: Path) -> None:
    """Copy a file; the copy appears complete or not at all, and is synced to disk."""
    with temporary_folder(path) as folder:
        copy_file(source, folder / path.name)
        replace_file(folder / path.name, path)
    sync_folder(path.parent)


def move_files(folder: Path, target: Path) -> None:
    """Move all files in `folder` to the folder `target`, and sync them to disk.

    Each replaces a file of the same name in one step; other files in `target` stay.
    """
    sync_tree(folder)
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.is_symlink():
            (target / path.name).mkdir(exist_ok=True)
            move_files(path, target / path.name)
        else:
            replace_file(path, target / path.name)
    sync_folder(target)


def replace_file(new: Path, old: Path) -> None:
    """Rename the complete file `new` to `old`; an existing file is replaced and keeps its mode."""
    with name_write_errors(old):
        with suppress(FileNotFoundError):
            status = old.lstat()
            if stat.S_ISREG(status.st_mode):
                new.chmod(stat.S_IMODE(status.st_mode))
        new.replace(old)


def write_json(path: Path, data: Json) -> None:
    """Write a JSON file that appears complete or not at all."""
    write_file_atomically(path, (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode())


@contextmanager
def create_folder(
    path: StrPath, *, replace: bool = False, merge: bool = False, sources: Sequence[StrPath] = ()
) -> Iterator[Path]:
    """Yield a temporary folder that is renamed to `path` on success and removed on failure.

    Without `replace`, nothing but an empty folder may exist there. With it, a model folder is
    replaced, unless it is or contains one of `sources`. With `merge`, any folder is replaced, and
    files in it that the new one lacks are kept.
    """
    check_separate(LocalLocation(local_path(path)), sources)
    target = Path(os.path.realpath(local_path(path)))
    if replace:
        check_replaceable(target, replace=True)
    elif not (merge and target.is_dir()):
        check_absent(target)
    with temporary_folder(target) as folder, name_write_errors(target):
        yield folder
        if merge and target.is_dir():
            _keep_files(target, folder)
        commit_folder(folder, target, replace=replace or merge, merge=merge)


def _keep_files(old: Path, new: Path) -> None:
    """Link or copy the files and folders of a folder that another one lacks."""
    for path in old.rglob("*"):
        kept = new / path.relative_to(old)
        if os.path.lexists(kept):
            continue
        kept.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir() and not path.is_symlink():
            kept.mkdir(exist_ok=True)
        else:
            link_or_copy(path, kept)


@contextmanager
def temporary_file(target: Path) -> Iterator[tuple[Path, int]]:
    """Yield a new file beside `target` and its descriptor; remove it unless it was renamed."""
    with name_write_errors(target):
        remove_leftovers(target)
        path, descriptor = create_temporary_file(target)
        try:
            yield path, descriptor
        finally:
            path.unlink(missing_ok=True)
            os.close(descriptor)  # releases the lock: until then it is not a leftover


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """Yield a new folder beside `target`, and remove it at the end unless it was renamed."""
    with name_write_errors(target):
        make_folders(target.parent)
        remove_leftovers(target)
        folder, lock = create_temporary_folder(target)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def commit_folder(
    folder: Path, target: Path, *, replace: bool = False, merge: bool = False
) -> None:
    """Sync a complete folder and rename it to `target`.

    It replaces an empty folder or, with `replace`, any folder, file or link. With `merge`, files
    that were added to that folder in the meantime are kept.
    """
    sync_tree(folder)
    if replace and os.path.lexists(target):
        replace_folder(folder, target, merge=merge)
        return
    _keep_mode(folder, target)
    try:
        folder.rename(target)  # replaces an empty folder, in one step
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        if merge:
            replace_folder(folder, target, merge=True)
            return
        raise ConfigError(f"{target} was written by another process in the meantime") from error
    sync_folder(target.parent)


def replace_folder(new: Path, old: Path, *, merge: bool = False) -> None:
    """Rename the complete folder `new` to `old`, and remove what had that name before.

    With `merge`, files that only the old folder contains are kept.

    That may be a folder, a file, or a link, which is not followed. This is one step where the file
    system supports exchanging names. Elsewhere, a process that is killed between two steps leaves
    the old content under a hidden name that ends in `REPLACED_SUFFIX`. It is removed by a later
    write, once a folder with the name exists again.
    """
    obsolete = new
    _keep_mode(new, old)
    if not _exchange(new, old):
        obsolete = temporary_name(old, REPLACED_SUFFIX)
        try:
            old.rename(obsolete)
            new.rename(old)
        except BaseException:
            if os.path.lexists(obsolete) and not os.path.lexists(old):
                obsolete.rename(old)
            raise
    sync_folder(old.parent)
    if merge and obsolete.is_dir() and not obsolete.is_symlink():
        _keep_files(obsolete, old)
    if obsolete.is_symlink() or obsolete.is_file():
        obsolete.unlink()
    else:
        shutil.rmtree(obsolete, ignore_errors=True)  # leftovers are removed by the next write


def _keep_mode(new: Path, old: Path) -> None:
    if old.is_dir() and not old.is_symlink():
        new.chmod(stat.S_IMODE(old.stat().st_mode))


def remove_folder(path: Path) -> None:
    """Remove a folder: rename it in one step, then remove its content."""
    obsolete = temporary_name(path)
    path.rename(obsolete)
    sync_folder(path.parent)
    try:
        shutil.rmtree(obsolete)
    except OSError as error:  # which has the name of a file in it, without a folder
        error.filename = str(path)
        raise


def check_absent(target: Path) -> None:
    """Raise unless `target` does not exist or is an empty folder."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder")
    found = next(target.iterdir(), None)
    if found is not None:
        raise ConfigError(f"{target} already exists and is not empty (contains {found.name})")


def check_replaceable(target: Path, *, replace: bool) -> None:
    """Raise unless `target` is absent or, with `replace`, a model folder."""
    if not target.exists():
        return
    if not replace:
        raise ConfigError(f"{target} already exists; pass replace=True")
    if not target.is_dir():
        raise ConfigError(f"{target} is a file, not a folder")
    if any(target.iterdir()) and not any(target.rglob("*.safetensors")):
        raise ConfigError(f"{target} contains files but no model, and is not replaced")


def create_temporary_file(target: Path) -> tuple[Path, int]:
    """Create and lock a file with a temporary name beside `target`.

    Return its path and its descriptor, to be closed after it was renamed or removed.
    """
    while True:
        path = temporary_name(target)
        descriptor = create_file(path)
        if _lock_new(path, descriptor):
            return path, descriptor


def create_temporary_folder(target: Path) -> tuple[Path, int]:
    """Create and lock a folder with a temporary name beside `target`.

    Return its path and its descriptor, to be closed after it was renamed or removed.
    """
    while True:
        path = temporary_name(target)
        path.mkdir()
        try:
            descriptor = os.open(path, _FOLDER)
        except FileNotFoundError:  # another process removed it as a leftover
            continue
        if _lock_new(path, descriptor):
            return path, descriptor


def _lock_new(path: Path, descriptor: int) -> bool:
    """Lock a new file; return False if another process removed it as a leftover before."""
    with suppress(OSError):  # without locks, nothing is removed as a leftover
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    if _is_same(path, descriptor):
        return True
    os.close(descriptor)
    return False


def _is_same(path: Path, descriptor: int) -> bool:
    """Return True if `path` is the open file and not a link to it."""
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def temporary_name(path: Path, suffix: str = TEMPORARY_SUFFIX) -> Path:
    """Return a new hidden name beside `path`."""
    return path.with_name(f"{_prefix(path)}{secrets.token_hex(4)}{suffix}")


def remove_leftovers(target: Path, before: Callable[[Path], None] | None = None) -> None:
    """Remove the temporary files and folders that killed writers of `target` left behind.

    `before` is called with each of them while it is locked, before it is removed.

    Those of running writers are locked and stay. So do those of other machines, because not every
    shared file system has locks between machines.
    """
    for suffix in (TEMPORARY_SUFFIX, REPLACED_SUFFIX):
        for path in target.parent.glob(glob.escape(_prefix(target)) + "[0-9a-f]" * 8 + suffix):
            if suffix == REPLACED_SUFFIX and not target.exists():  # it is the only complete folder
                continue
            remove_unlocked(path, before)


def find_leftovers(folder: Path) -> list[Path]:
    """Return the temporary folders that interrupted writes and removals left in `folder`.

    Those of running writers are locked and not listed; neither are links and other names.
    """
    found = (path for path in folder.iterdir() if _LEFTOVER.fullmatch(path.name))
    return sorted(path for path in found if not _is_in_use(path))


def _is_in_use(path: Path) -> bool:
    """Return True if a temporary folder is locked, or cannot be locked, or is not a folder."""
    try:
        descriptor = os.open(path, _FOLDER)
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock a folder; raise `InUseError` if another process has locked it.

    The lock is the file `.lock`, which must not be a link, and contains the number of the process.
    """
    with _open_lock(folder / ".lock") as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, _PID_BYTES, 0).decode(errors="replace").strip()
            raise InUseError(f"{folder}: in use by process {owner or 'unknown'}") from None
        with suppress(OSError):  # only for messages: the lock does not depend on it
            _write_owner(descriptor)
        yield


@contextmanager
def lock_replacement(target: Path) -> Iterator[None]:
    """Wait until no other process replaces `target`, which takes several steps for shards.

    The lock is a hidden file that exists only meanwhile. There is no lock if the file system has
    none.
    """
    path = target.with_name(f".{target.name}.lock{TEMPORARY_SUFFIX}")
    while True:
        with _open_lock(path) as descriptor:
            with suppress(OSError):  # not supported
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if not _is_same(path, descriptor):  # removed by the process that had the lock
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


@contextmanager
def _open_lock(path: Path) -> Iterator[int]:
    """Yield the descriptor of a lock file; raise `ConfigError` if it is a link or a pipe."""
    try:
        descriptor = os.open(path, _LOCK, 0o666)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
        raise ConfigError(f"{path} is not a regular file; remove it") from error
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ConfigError(f"{path} is not a regular file; remove it")
        yield descriptor
    finally:
        os.close(descriptor)


def _write_owner(descriptor: int) -> None:
    """Write the number of this process to a lock file that contains nothing else."""
    found = os.pread(descriptor, _PID_BYTES + 1, 0)
    if os.fstat(descriptor).st_nlink == 1 and (found.strip().isdigit() or not found):
        os.pwrite(descriptor, str(os.getpid()).ljust(_PID_BYTES).encode(), 0)


def apply_umask(folder: Path) -> None:
    """Give the weight files in `folder` the mode of new files; safetensors makes them private."""
    with temporary_file(folder / "mode") as (_, descriptor):
        mode = stat.S_IMODE(os.fstat(descriptor).st_mode)
    for path in folder.glob("*.safetensors"):
        path.chmod(mode)


def make_folders(path: Path) -> None:
    """Create a folder and its missing parents, so that they survive a power failure."""
    if path.is_dir():
        return
    make_folders(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_tree(folder: Path) -> None:
    """Sync all files and folders in `folder`, and itself, to disk; links are not followed."""
    for root, _, names in os.walk(folder, topdown=False):
        for name in names:
            path = Path(root, name)
            if stat.S_ISREG(path.lstat().st_mode):
                _sync(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        sync_folder(Path(root))


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure."""
    _sync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _sync(path: Path, flags: int) -> None:
    with name_write_errors(path):
        descriptor = os.open(path, flags | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _prefix(path: Path) -> str:
    return f".{os.fsdecode(os.fsencode(path.name)[:_MAX_NAME])}.{machine_id()}"


@cache
def machine_id() -> str:
    """Return 8 hexadecimal digits that identify this machine."""
    name = f"{platform.node()} {uuid.getnode()}"
    return hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:8]


def remove_unlocked(path: Path, before: Callable[[Path], None] | None = None) -> bool:
    """Remove a temporary file or folder of a killed writer; return False if it cannot be removed.

    It may be in use, already removed, a link, or not permitted.
    """
    try:
        mode = path.lstat().st_mode
        if stat.S_ISDIR(mode):
            descriptor = os.open(path, _FOLDER)
        elif stat.S_ISREG(mode):  # network file systems require write access for a lock
            descriptor = os.open(path, _LOCK & ~os.O_CREAT)
        else:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not _is_same(path, descriptor):
                return False
            if before is not None:
                before(path)
            shutil.rmtree(path) if stat.S_ISDIR(mode) else path.unlink()
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Exchange the names of two folders in one step; return False if that is not supported."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    at_cwd, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    if rename is None:
        return False
    return bool(rename(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0)
