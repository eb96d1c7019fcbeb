"""Open, create and copy local files without following links or waiting for pipes.

Files to read may be links, but must lead to regular files: opening a pipe would wait forever.
Files to create must not exist, not even as links.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from slimtensors.errors import FormatError

StrPath = str | os.PathLike[str]

TEMPORARY_SUFFIX = ".slimtensors-tmp"
"""Suffix of names that are being written or removed."""

_CHUNK = 1 << 24
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


def open_regular(path: StrPath, *, dir_fd: int | None = None, name: StrPath | None = None) -> int:
    """Return a descriptor to read a regular file; raise `FormatError` for a pipe or device.

    `name` is used in messages if `path` is relative to `dir_fd`.
    """
    name = os.fspath(name or path)
    try:
        descriptor = os.open(path, _READ, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.ENXIO:
            raise FormatError(f"{name} is a socket or device, not a regular file") from None
        error.filename = name
        raise
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device"
    raise FormatError(f"{name} is {kind}, not a regular file")


def open_for_reading(path: StrPath) -> BinaryIO:
    """Return a regular file, opened for reading."""
    return os.fdopen(open_regular(path), "rb")


def read_bytes(path: StrPath) -> bytes:
    """Return the content of a regular file."""
    with open_for_reading(path) as file:
        return file.read()


def read_text(path: StrPath) -> str:
    """Return the content of a regular UTF-8 file."""
    return read_bytes(path).decode()


def create_file(path: Path, *, mode: int = 0o666) -> int:
    """Return a descriptor of a new file with `mode` as far as the umask permits it."""
    return os.open(path, _CREATE, mode)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file to a new one and sync it; it has the mode of `source` that the umask permits."""
    with os.fdopen(open_regular(source), "rb") as file, name_write_errors(target):
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o777
        with os.fdopen(create_file(target, mode=mode), "wb") as copy:
            shutil.copyfileobj(file, copy, _CHUNK)
            copy.flush()
            os.fsync(copy.fileno())


def link_or_copy(source: StrPath, target: StrPath) -> None:
    """Create a hard link to a file, or a copy where the file system has no links."""
    try:
        Path(target).hardlink_to(source)
    except OSError:  # not supported, or not permitted
        copy_file(Path(source), Path(target))


@contextmanager
def name_write_errors(target: StrPath) -> Iterator[None]:
    """Add the path to errors such as a full disk, which have none or a temporary one."""
    try:
        yield
    except OSError as error:
        found = error.filename
        if error.errno is not None and (found is None or TEMPORARY_SUFFIX in os.fsdecode(found)):
            error.filename, error.filename2 = os.fspath(target), None
        raise
