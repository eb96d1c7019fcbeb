"""Locations of files and folders: local paths and fsspec URLs, read by byte ranges."""

import errno
import mmap
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from slimtensors.errors import ConfigError, CorruptFileError, MissingDependencyError
from slimtensors.storage.files import StrPath, open_regular
from slimtensors.storage.remote_file import IN_FLIGHT, PART, Range, RemoteFile
from slimtensors.storage.retry import send

_PAGE = mmap.PAGESIZE
_LARGE = 1 << 20
"""Bytes from which on a range is read or released on its own."""
_READ_AHEAD = 64 << 20


def locate(where: StrPath, *, storage_options: dict[str, Any] | None = None) -> "Location":
    """Return the location of a path or URL; `storage_options` are passed to the file system."""
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


def local_path(path: StrPath) -> Path:
    """Return a local path; raise `ConfigError` if it is a URL."""
    if isinstance(path, str) and "://" in path:
        raise ConfigError(f"{path} is a URL; only local files and folders are supported")
    if path == "":
        raise ConfigError("the path is empty")
    return Path(path)


class ByteSource(Protocol):
    """An open file that is read by byte ranges."""

    name: str
    size: int
    identity: object
    """Differs if the file is replaced or changed; None if that is unknown."""

    def read(self, begin: int, end: int) -> memoryview:
        """Return a read-only view of the bytes, valid until `release`."""
        ...

    def read_ranges(
        self, ranges: Iterable[Range], *, in_flight: int = IN_FLIGHT
    ) -> Iterator[memoryview]:
        """Yield the bytes of each range in this order; request `in_flight` bytes at a time."""
        ...

    def release(self, begin: int, end: int) -> None:
        """Free the memory of bytes that are no longer needed."""
        ...


class Location(Protocol):
    """A file or folder to read."""

    @property
    def name(self) -> str:
        """The last component."""
        ...

    def parent(self) -> "Location":
        """Return the parent folder."""
        ...

    def child(self, name: str) -> "Location":
        """Return the file `name` in this folder."""
        ...

    def exists(self) -> bool:
        """Return True if the file or folder exists."""
        ...

    def is_folder(self) -> bool:
        """Return True if this is a folder."""
        ...

    def stamp(self) -> str:
        """Return a text that changes when the file changes."""
        ...

    def identity(self) -> object:
        """Return a value that differs if the file is replaced or changed; None if unknown."""
        ...

    def pin(self) -> AbstractContextManager["Location"]:
        """Return a context with a location that stays the same if its folder is replaced."""
        ...

    def files(self) -> list[str]:
        """List the names of the files in this folder, sorted."""
        ...

    def walk(self) -> list[str]:
        """List the relative paths of all files in this folder, recursively, sorted."""
        ...

    def read(self) -> bytes:
        """Read a whole small file."""
        ...

    def open(self) -> ByteSource:
        """Open the file for reading by byte ranges."""
        ...


@dataclass(frozen=True)
class LocalLocation:
    """A local path."""

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
        status = self.path.stat()
        return f"{status.st_size}:{status.st_mtime_ns}"

    def identity(self) -> object:  # noqa: D102
        try:
            return _identify(self.path.stat())
        except OSError as error:
            return error.errno

    @contextmanager
    def pin(self) -> Iterator["LocalLocation"]:  # noqa: D102
        is_folder = self.is_folder()
        folder = self.path if is_folder else self.path.parent
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            pinned = PinnedFolder(folder, descriptor)
            yield pinned if is_folder else pinned.child(self.path.name)
        finally:
            os.close(descriptor)

    def files(self) -> list[str]:  # noqa: D102
        return sorted(path.name for path in self.path.iterdir() if path.is_file())

    def walk(self) -> list[str]:  # noqa: D102
        found = (path for path in self.path.rglob("*") if path.is_file())
        return sorted(path.relative_to(self.path).as_posix() for path in found)

    def read(self) -> bytes:  # noqa: D102
        with os.fdopen(self._open(), "rb") as file:
            return file.read()

    def open(self) -> ByteSource:  # noqa: D102
        descriptor = self._open()
        try:
            return MappedFile(descriptor, str(self.path))
        finally:
            os.close(descriptor)

    def _open(self) -> int:
        return open_regular(self.path)


@dataclass(frozen=True)
class PinnedFolder(LocalLocation):
    """A local folder that was opened once; another folder may get its name."""

    descriptor: int

    def child(self, name: str) -> "PinnedFile":  # noqa: D102
        return PinnedFile(self.path / name, self.descriptor, name)

    def files(self) -> list[str]:  # noqa: D102
        with os.scandir(self.descriptor) as entries:
            return sorted(entry.name for entry in entries if entry.is_file())


@dataclass(frozen=True)
class PinnedFile(LocalLocation):
    """A file in a pinned folder."""

    descriptor: int
    key: str
    """Path relative to the folder."""

    def parent(self) -> PinnedFolder:  # noqa: D102
        return PinnedFolder(self.path.parent, self.descriptor)

    def is_folder(self) -> bool:  # noqa: D102
        return False

    def identity(self) -> object:  # noqa: D102
        try:
            return _identify(os.stat(self.key, dir_fd=self.descriptor))
        except OSError as error:
            return error.errno

    def _open(self) -> int:
        return open_regular(self.key, dir_fd=self.descriptor, name=self.path)


def _identify(status: os.stat_result) -> object:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


@dataclass(frozen=True)
class RemoteLocation:
    """A path in an fsspec file system."""

    filesystem: Any
    path: str  # a PurePath would remove a slash of http://

    def __str__(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.path))

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.rpartition("/")[2]

    @property
    def protocols(self) -> tuple[str, ...]:
        """Names of the file system in URLs."""
        protocols = self.filesystem.protocol
        return (protocols,) if isinstance(protocols, str) else tuple(protocols)

    @property
    def is_http(self) -> bool:
        """Whether this is a web server: it lists no folders, and may not read ranges."""
        return "http" in self.protocols

    def parent(self) -> "RemoteLocation":  # noqa: D102
        return RemoteLocation(self.filesystem, self.path.rpartition("/")[0])

    def child(self, name: str) -> "RemoteLocation":  # noqa: D102
        return RemoteLocation(self.filesystem, f"{self.path}/{name}")

    def exists(self) -> bool:  # noqa: D102
        self.filesystem.invalidate_cache()  # other processes may write there
        return bool(send(str(self), lambda: self.filesystem.exists(self.path)))

    def stamp(self) -> str:  # noqa: D102
        size = self.size()
        return f"{size}:{send(str(self), lambda: self.filesystem.checksum(self.path))}"

    def identity(self) -> object:
        """Return None: a file system may have none, and asking for it takes time."""
        return None

    def pin(self) -> AbstractContextManager["RemoteLocation"]:
        """Return a context with this location: remote folders cannot be renamed."""
        return nullcontext(self)

    def is_folder(self) -> bool:  # noqa: D102
        files = self.filesystem
        return bool(send(str(self), lambda: not files.isfile(self.path) and files.isdir(self.path)))

    def files(self) -> list[str]:  # noqa: D102
        listing = send(str(self), lambda: self.filesystem.ls(self.path, detail=True))
        return sorted(e["name"].rpartition("/")[2] for e in listing if e["type"] == "file")

    def walk(self) -> list[str]:  # noqa: D102
        self.filesystem.invalidate_cache()
        found = send(str(self), lambda: self.filesystem.find(self.path))
        return sorted(str(path).removeprefix(self.path).lstrip("/") for path in found)

    def read(self) -> bytes:  # noqa: D102
        return send(str(self), lambda: bytes(self.filesystem.cat_file(self.path)))

    def open(self) -> ByteSource:  # noqa: D102
        return RemoteFile(
            self.filesystem, self.path, str(self), self.size(), is_divided=not self.is_http
        )

    # The part of pathlib's interface that reading a checkpoint takes, see `Folder`.

    def __truediv__(self, name: str) -> "RemoteLocation":
        return self.child(name)

    def with_name(self, name: str) -> "RemoteLocation":
        """Return the file or folder of this name beside it."""
        return self.parent().child(name)

    def is_file(self) -> bool:
        """Return True if this is a file now."""
        self.filesystem.invalidate_cache()
        return bool(send(str(self), lambda: self.filesystem.isfile(self.path)))

    def is_symlink(self) -> bool:
        """Return False: links are not distinguished from what they lead to."""
        return False

    def folders(self) -> "list[RemoteLocation]":
        """List the folders in this folder, sorted."""
        self.filesystem.invalidate_cache()
        listing = send(str(self), lambda: self.filesystem.ls(self.path, detail=True))
        names = (e["name"].rstrip("/") for e in listing if e["type"] == "directory")
        return [self.child(name.rpartition("/")[2]) for name in sorted(names)]

    def size(self) -> int:
        """Return the size of the file in bytes."""
        self.filesystem.invalidate_cache()
        size = send(str(self), lambda: self.filesystem.info(self.path)["size"])
        if size is None:
            raise OSError(f"{self}: the server did not report the file size")
        return int(size)

    def modified(self) -> datetime | None:
        """Return when the file was written by the clock of the storage; None if unknown."""
        self.filesystem.invalidate_cache()
        with suppress(NotImplementedError):
            found = send(str(self), lambda: self.filesystem.modified(self.path))
            if isinstance(found, datetime):
                return found if found.tzinfo else found.replace(tzinfo=UTC)
        return None

    def contains(self, other: StrPath) -> bool:
        """Return True if `other` is this location or inside of it."""
        path = self._resolve(other)
        return path is not None and f"{path}/".startswith(f"{self.path}/")

    def is_inside(self, other: StrPath) -> bool:
        """Return True if this location is inside of `other`."""
        path = self._resolve(other)
        return path is not None and self.path.startswith(f"{path}/")

    def _resolve(self, other: StrPath) -> str | None:
        """Return the path of `other` in this file system, or None if it is in another one."""
        from fsspec.utils import get_protocol

        if get_protocol(str(other)) not in self.protocols:
            return None
        return str(self.filesystem._strip_protocol(str(other))).rstrip("/")

    def write(self, data: bytes) -> None:
        """Write a file with this content."""
        send(str(self), lambda: self.filesystem.pipe_file(self.path, data))

    def create(self, data: bytes) -> None:
        """Write a new file; raise `FileExistsError` if it exists, in one step where supported."""

        def request() -> None:
            try:
                self.filesystem.pipe_file(self.path, data, mode="create")
            except OSError as error:
                if error.errno == errno.EINVAL and "condition" in str(error):  # status 412
                    raise FileExistsError(f"{self} already exists") from error
                raise

        send(str(self), request)

    def upload(self, path: Path) -> None:
        """Upload a local file."""
        send(str(self), lambda: self.filesystem.put_file(str(path), self.path))

    def download(self, path: Path) -> None:
        """Download the file to a local path."""
        if self.is_http:
            send(str(self), lambda: self.filesystem.get_file(self.path, str(path)))
            return
        source = self.open()
        parts = range(0, source.size, PART)
        with path.open("wb") as file:
            for data in source.read_ranges((i, min(i + PART, source.size)) for i in parts):
                file.write(data)

    def make_folder(self) -> None:
        """Create the folder and its parents, where the file system has folders."""
        send(str(self), lambda: self.filesystem.makedirs(self.path, exist_ok=True))

    def unlink(self) -> None:
        """Remove a file if it exists."""
        with suppress(FileNotFoundError):
            send(str(self), lambda: self.filesystem.rm_file(self.path))

    def remove(self) -> None:
        """Remove the file or folder, recursively, if it exists."""
        if self.exists():
            send(str(self), lambda: self.filesystem.rm(self.path, recursive=True))


Folder = Path | RemoteLocation
"""A folder or file; both types have the same methods for reading."""


def is_url(where: StrPath) -> bool:
    """Return True for a URL, False for a local path."""
    return isinstance(where, str) and "://" in where


def file_size(path: Folder) -> int:
    """Return the size of a file in bytes."""
    return path.stat().st_size if isinstance(path, Path) else path.size()


def parent_of(folder: Folder) -> Folder:
    """Return the parent folder."""
    return folder.parent if isinstance(folder, Path) else folder.parent()


def as_location(folder: Folder) -> Location:
    """Return a path as a location."""
    return LocalLocation(folder) if isinstance(folder, Path) else folder


def locate_folder(where: StrPath, storage_options: dict[str, Any] | None = None) -> Folder:
    """Return a local path or, for a URL, its location; `file://` is local."""
    found = locate(where, storage_options=storage_options)
    if isinstance(found, LocalLocation):
        if storage_options:
            raise ConfigError(f"{where} is a local path; storage_options are for URLs")
        return local_path(where)
    assert isinstance(found, RemoteLocation)
    return Path(found.path) if "file" in found.protocols else found


class MappedFile:
    """A memory-mapped local file. Used pages are released, so that memory stays flat."""

    def __init__(self, descriptor: int, name: str) -> None:
        status = os.fstat(descriptor)
        self.name, self.size = name, status.st_size
        self.identity = _identify(status)
        if self.size == 0:
            raise CorruptFileError(f"{name}: the file is empty")
        # Copy-on-write only so that torch does not warn about read-only memory.
        try:
            self._map = mmap.mmap(descriptor, self.size, access=mmap.ACCESS_COPY)
        except ValueError as error:
            raise CorruptFileError(f"{name}: truncated while it was opened") from error
        self._bytes = memoryview(self._map)
        self._unreleased = 0
        self._last = self._fetched = 0

    def read(self, begin: int, end: int) -> memoryview:
        """Return a view of the mapped bytes."""
        if end - begin >= _LARGE:
            self._prefetch(begin, end)
        return self._bytes[begin:end]

    def read_ranges(
        self, ranges: Iterable[Range], *, in_flight: int = IN_FLIGHT
    ) -> Iterator[memoryview]:
        """Yield views of the mapped bytes."""
        yield from (self.read(begin, end) for begin, end in ranges)

    def _prefetch(self, begin: int, end: int) -> None:
        """Prefetch these pages and, on sequential access, those that follow.

        The disk then works while they are decoded.
        """
        is_sequential = abs(begin - self._last) < _READ_AHEAD  # threads read out of order
        self._last = end
        if not is_sequential:
            self._fetched = begin
        elif self._fetched - end >= _READ_AHEAD // 2:
            return
        start, stop = max(begin, self._fetched), min(end + _READ_AHEAD * is_sequential, self.size)
        if start < stop:
            self._advise("MADV_WILLNEED", start, stop)
            self._fetched = stop

    def release(self, begin: int, end: int) -> None:
        """Release the pages; those of small ranges together, once they add up."""
        if end - begin >= _LARGE:
            self._advise("MADV_DONTNEED", begin, end)
            return
        self._unreleased += end - begin
        if self._unreleased > 4 * _LARGE:
            self._unreleased = 0
            self._advise("MADV_DONTNEED", 0, self.size)

    def _advise(self, advice: str, begin: int, end: int) -> None:
        if hasattr(mmap, advice):
            start = begin // _PAGE * _PAGE
            self._map.madvise(getattr(mmap, advice), start, end - start)
