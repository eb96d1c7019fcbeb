"""Folders that appear whole or not at all."""

import ctypes
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slimtensors.container import StrPath, local, sync_folder
from slimtensors.errors import ConfigError

MARK = ".slimtensors-tmp"
"""How the names of folders end that are not complete, or no longer."""


@contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """Give a folder to fill, which takes the name `path` at the end, or disappears.

    An empty folder may be there already; a checkpoint is never written over another one.
    """
    target = Path(os.path.realpath(local(path)))
    check_free(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = hidden(target)
    folder.mkdir()
    try:
        yield folder
        place_folder(folder, target)
    except OSError as error:
        if error.filename is None:  # a full disk, for one: writing names no file
            error.filename = str(target)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def place_folder(folder: Path, target: Path) -> None:
    """Give a complete folder its name, which none but an empty folder may have."""
    sync_folder(folder)
    try:
        folder.rename(target)  # over an empty folder too, in one step
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise ConfigError(f"{target}: somebody else has saved there meanwhile") from error
    sync_folder(target.parent)


def replace_folder(new: Path, old: Path) -> None:
    """Give a complete folder the name of another one, which then disappears."""
    gone = new
    if not _exchange(new, old):
        gone = hidden(old)
        old.rename(gone)
        try:
            new.rename(old)
        except BaseException:
            gone.rename(old)
            raise
    sync_folder(old.parent)
    shutil.rmtree(gone)


def write_file(path: Path, raw: bytes) -> None:
    """Write a small file and make sure that it is on the disk."""
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def remove_folder(path: Path) -> None:
    """Remove a folder: it loses its name in one step, then its content."""
    gone = hidden(path)
    path.rename(gone)
    sync_folder(path.parent)
    shutil.rmtree(gone)


def leftovers(folder: Path) -> list[Path]:
    """List what interrupted saves and removals have left behind."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(MARK) and path.is_dir())


def hidden(path: Path) -> Path:
    """Return a new name, beside `path`, for a folder that is not complete."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}{MARK}")


def _exchange(a: Path, b: Path) -> bool:
    """Give two folders each other's names in one step; tell whether the system could."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    here, both = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(a), here, os.fsencode(b), both) == 0


def check_free(target: Path) -> None:
    """Raise unless a folder of this name may be made: nothing is there, or an empty one."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target}: is a file; a checkpoint needs a folder of its own")
    found = next(target.iterdir(), None)
    if found is not None:
        raise ConfigError(f"{target}: holds {found.name}; a checkpoint is never written over")
