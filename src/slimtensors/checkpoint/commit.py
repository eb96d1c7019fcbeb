"""Folders that appear whole or not at all."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from slimtensors.container import MARK, StrPath, hidden_folder, hidden_name, local, sync_folder
from slimtensors.errors import ConfigError


@contextmanager
def new_folder(path: StrPath) -> Iterator[Path]:
    """Give a folder to fill, which takes the name `path` at the end, or disappears.

    An empty folder may be there already; a checkpoint is never written over another one.
    """
    target = Path(os.path.realpath(local(path)))
    check_free(target)
    with hidden_folder(target) as folder:
        try:
            yield folder
            place_folder(folder, target)
        except OSError as error:
            if error.filename is None:  # a full disk, for one: writing names no file
                error.filename = str(target)
            raise


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


def write_file(path: Path, raw: bytes) -> None:
    """Write a small file and make sure that it is on the disk."""
    with path.open("xb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def remove_folder(path: Path) -> None:
    """Remove a folder: it loses its name in one step, then its content."""
    gone = hidden_name(path)
    path.rename(gone)
    sync_folder(path.parent)
    shutil.rmtree(gone)


def leftovers(folder: Path) -> list[Path]:
    """List what interrupted saves and removals have left behind."""
    return sorted(path for path in folder.iterdir() if path.name.endswith(MARK) and path.is_dir())


def check_free(target: Path) -> None:
    """Raise unless a folder of this name may be made: nothing is there, or an empty one."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"{target}: is a file; a checkpoint needs a folder of its own")
    found = next(target.iterdir(), None)
    if found is not None:
        raise ConfigError(f"{target}: holds {found.name}; a checkpoint is never written over")
