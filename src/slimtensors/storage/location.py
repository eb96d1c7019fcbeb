"""Locations of files: local paths and fsspec URLs, opened as ranges of bytes."""

import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slimtensors.errors import ConfigError, CorruptFileError, MissingDependencyError, SlimError

_PAGE = mmap.PAGESIZE
_LARGE = 1 << 20
_AHEAD = 64 << 20


class ByteSource(Protocol):
    """An open file of known size."""

    name: str
    size: int

    def read(self, begin: int, end: int) -> memoryview:
        """Return these bytes; they are only to be read, and before `release`."""
        ...

    def release(self, begin: int, end: int) -> None:
        """Say that these bytes are no longer needed."""
        ...


class MappedFile:
    """A local file, mapped. Pages that were used are given back, so memory stays flat."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        with path.open("rb") as file:
            self.size = os.fstat(file.fileno()).st_size
            if self.size == 0:
                raise CorruptFileError(f"{path}: the file is empty")
            # Copy-on-write only so that torch takes the pages without a warning; nobody writes.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self._bytes = memoryview(self._map)
        self._small = 0
        self._last = self._fetched = 0

    def read(self, begin: int, end: int) -> memoryview:
        """Return a view of the mapped bytes."""
        if end - begin >= _LARGE:
            self._fetch(begin, end)
        return self._bytes[begin:end]

    def _fetch(self, begin: int, end: int) -> None:
        """Have these pages fetched; for who reads on from where he was, those that come next too.

        The disk then works while they are decoded.
        """
        reads_on = abs(begin - self._last) < _AHEAD  # threads side by side come in any order
        self._last = end
        if not reads_on:
            self._fetched = begin
        elif self._fetched - end >= _AHEAD // 2:
            return
        start, stop = max(begin, self._fetched), min(end + _AHEAD * reads_on, self.size)
        if start < stop:
            self._advise("MADV_WILLNEED", start, stop)
            self._fetched = stop

    def release(self, begin: int, end: int) -> None:
        """Give the pages back; those of small ranges together, once they add up."""
        if end - begin >= _LARGE:
            self._advise("MADV_DONTNEED", begin, end)
            return
        self._small += end - begin
        if self._small > 4 * _LARGE:
            self._small = 0
            self._advise("MADV_DONTNEED", 0, self.size)

    def _advise(self, advice: str, begin: int, end: int) -> None:
        if hasattr(mmap, advice):
            start = begin // _PAGE * _PAGE
            self._map.madvise(getattr(mmap, advice), start, end - start)


@contextmanager
def name_errors(url: str) -> Iterator[None]:
    """Make errors of a file system `OSError`s that name what could not be reached."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(f"{url}: no such file or folder") from None
    except (OSError, SlimError):
        raise
    except Exception as error:  # every client of a storage service has its own kinds
        raise OSError(f"{url}: {error}") from error


class RemoteFile:
    """A file of fsspec's. Small reads come from a block read ahead, large ones go by themselves."""

    def __init__(self, filesystem: Any, path: str, name: str) -> None:
        self.name = name
        with name_errors(name):
            size = filesystem.info(path)["size"]
        if size is None:
            raise OSError(f"{name}: the server does not say how large it is")
        self.size = int(size)
        self._filesystem, self._path = filesystem, path
        self._ahead, self._block = 0, memoryview(b"")
        self._lock = threading.Lock()

    def read(self, begin: int, end: int) -> memoryview:
        """Fetch the bytes."""
        if end - begin >= _LARGE:
            return self._fetch(begin, end)
        with self._lock:
            last = self._ahead + len(self._block)
            if not self._ahead <= begin <= end <= last:
                # Far ahead only for who reads on from where he was.
                wanted = begin + (4 * _LARGE if self._ahead <= begin <= last else _LARGE // 16)
                self._block = self._fetch(begin, min(max(wanted, end), self.size))
                self._ahead = begin
            start = begin - self._ahead
            return self._block[start : start + end - begin]

    def release(self, begin: int, end: int) -> None:
        """Do nothing: what was read belongs to who asked for it."""

    def _fetch(self, begin: int, end: int) -> memoryview:
        if begin == end:
            return memoryview(b"")
        with name_errors(self.name):
            data = bytearray(self._filesystem.cat_file(self._path, start=begin, end=end))
        if len(data) == self.size:  # a server that does not know ranges sends everything
            data = data[begin:end]
        if len(data) != end - begin:
            raise CorruptFileError(f"{self.name}: asked for {end - begin} bytes, got {len(data)}")
        return memoryview(data)  # of a bytearray, as torch warns about memory it may not write


StrPath = str | os.PathLike[str]


class Location(Protocol):
    """A file or a folder that may be read."""

    @property
    def name(self) -> str:
        """The last component."""
        ...

    def parent(self) -> "Location":
        """Return the folder that holds this."""
        ...

    def child(self, name: str) -> "Location":
        """Return the file called `name` in this folder."""
        ...

    def exists(self) -> bool:
        """Tell whether there is something."""
        ...

    def is_folder(self) -> bool:
        """Tell whether this is a folder."""
        ...

    def stamp(self) -> str:
        """Return what is another text once the file has been changed."""
        ...

    def files(self) -> list[str]:
        """List the names of the files in this folder, sorted."""
        ...

    def walk(self) -> list[str]:
        """List the relative paths of all files in this folder and the folders in it, sorted."""
        ...

    def read(self) -> bytes:
        """Read a small file whole."""
        ...

    def open(self) -> ByteSource:
        """Open the file for reading ranges of it."""
        ...


@dataclass(frozen=True)
class LocalLocation:
    """A path on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.name

    def parent(self) -> "LocalLocation":  # noqa: D102
        return LocalLocation(self.path.parent)

    def child(self, name: str) -> "LocalLocation":  # noqa: D102
        return LocalLocation(self.path / name)

    def exists(self) -> bool:  # noqa: D102
        return self.path.exists()

    def is_folder(self) -> bool:  # noqa: D102
        return self.path.is_dir()

    def stamp(self) -> str:  # noqa: D102
        found = self.path.stat()
        return f"{found.st_size}:{found.st_mtime_ns}"

    def files(self) -> list[str]:  # noqa: D102
        return sorted(path.name for path in self.path.iterdir() if path.is_file())

    def walk(self) -> list[str]:  # noqa: D102
        found = (path for path in self.path.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.path).as_posix() for path in found)

    def read(self) -> bytes:  # noqa: D102
        return self.path.read_bytes()

    def open(self) -> ByteSource:  # noqa: D102
        return MappedFile(self.path)


@dataclass(frozen=True)
class RemoteLocation:
    """A path in one of fsspec's file systems."""

    filesystem: Any
    path: str  # not a PurePath, which would take a slash out of http://

    def __str__(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.path))

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.rpartition("/")[2]

    def parent(self) -> "RemoteLocation":  # noqa: D102
        return RemoteLocation(self.filesystem, self.path.rpartition("/")[0])

    def child(self, name: str) -> "RemoteLocation":  # noqa: D102
        return RemoteLocation(self.filesystem, f"{self.path}/{name}")

    def exists(self) -> bool:  # noqa: D102
        with name_errors(str(self)):
            self.filesystem.invalidate_cache()  # others write there too
            return bool(self.filesystem.exists(self.path))

    def stamp(self) -> str:  # noqa: D102
        with name_errors(str(self)):
            self.filesystem.invalidate_cache()
            size = self.filesystem.info(self.path)["size"]
            return f"{size}:{self.filesystem.checksum(self.path)}"

    def is_folder(self) -> bool:  # noqa: D102
        with name_errors(str(self)):
            return not self.filesystem.isfile(self.path) and bool(self.filesystem.isdir(self.path))

    def files(self) -> list[str]:  # noqa: D102
        with name_errors(str(self)):
            listing = self.filesystem.ls(self.path, detail=True)
        return sorted(e["name"].rpartition("/")[2] for e in listing if e["type"] == "file")

    def walk(self) -> list[str]:  # noqa: D102
        with name_errors(str(self)):
            found = self.filesystem.find(self.path)
        return sorted(str(path).removeprefix(self.path).lstrip("/") for path in found)

    def read(self) -> bytes:  # noqa: D102
        with name_errors(str(self)):
            return bytes(self.filesystem.cat_file(self.path))

    def open(self) -> ByteSource:  # noqa: D102
        return RemoteFile(self.filesystem, self.path, str(self))

    def holds(self, other: StrPath) -> bool:
        """Tell whether another place lies in this one, or is it."""
        path = self._path_of(other)
        return path is not None and f"{path}/".startswith(f"{self.path}/")

    def lies_in(self, other: StrPath) -> bool:
        """Tell whether this lies in another place."""
        path = self._path_of(other)
        return path is not None and self.path.startswith(f"{path}/")

    def _path_of(self, other: StrPath) -> str | None:
        """Return what this file system calls a place; none if it is another one's."""
        from fsspec.utils import get_protocol

        known = self.filesystem.protocol
        if get_protocol(str(other)) not in ((known,) if isinstance(known, str) else known):
            return None
        return str(self.filesystem._strip_protocol(str(other))).rstrip("/")

    def write(self, data: bytes) -> None:
        """Make this a file with that content."""
        with name_errors(str(self)):
            self.filesystem.pipe_file(self.path, data)

    def send(self, path: Path) -> None:
        """Make this a copy of a file of this machine."""
        with name_errors(str(self)):
            self.filesystem.put_file(str(path), self.path)

    def remove(self) -> None:
        """Remove the file, or the folder and all that is in it, if there is one."""
        if self.exists():
            with name_errors(str(self)):
                self.filesystem.rm(self.path, recursive=True)


def local_path(path: StrPath) -> Path:
    """Return a path of this machine; raise if it is a URL."""
    if isinstance(path, str) and "://" in path:
        raise ConfigError(f"{path}: is a URL; this takes only files and folders of this machine")
    if path == "":
        raise ConfigError("an empty path names nothing")
    return Path(path)


def locate(where: StrPath, *, storage_options: dict[str, Any] | None = None) -> Location:
    """Return the place that a path or URL names; `storage_options` go to the file system."""
    if not (isinstance(where, str) and "://" in where):
        return LocalLocation(local_path(where))
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise MissingDependencyError("fsspec", "remote") from None
    try:
        filesystem, path = url_to_fs(where, **(storage_options or {}))
    except ImportError as error:
        raise MissingDependencyError(str(error), "remote") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error
    return RemoteLocation(filesystem, path.rstrip("/"))
