"""Where files lie: a local path, or a URL that fsspec understands."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from slimtensors.container.source import MappedFile, RemoteFile, Source, naming
from slimtensors.errors import ConfigError, MissingDependencyError

StrPath = str | os.PathLike[str]


class Place(Protocol):
    """A file or a folder that may be read."""

    @property
    def name(self) -> str:
        """The last component."""
        ...

    def parent(self) -> "Place":
        """Return the folder that holds this."""
        ...

    def child(self, name: str) -> "Place":
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

    def open(self) -> Source:
        """Open the file for reading ranges of it."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """A path on this machine."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.name

    def parent(self) -> "LocalPlace":  # noqa: D102
        return LocalPlace(self.path.parent)

    def child(self, name: str) -> "LocalPlace":  # noqa: D102
        return LocalPlace(self.path / name)

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

    def open(self) -> Source:  # noqa: D102
        return MappedFile(self.path)


@dataclass(frozen=True)
class RemotePlace:
    """A path in one of fsspec's file systems."""

    filesystem: Any
    path: str  # not a PurePath, which would take a slash out of http://

    def __str__(self) -> str:
        return str(self.filesystem.unstrip_protocol(self.path))

    @property
    def name(self) -> str:  # noqa: D102
        return self.path.rpartition("/")[2]

    def parent(self) -> "RemotePlace":  # noqa: D102
        return RemotePlace(self.filesystem, self.path.rpartition("/")[0])

    def child(self, name: str) -> "RemotePlace":  # noqa: D102
        return RemotePlace(self.filesystem, f"{self.path}/{name}")

    def exists(self) -> bool:  # noqa: D102
        with naming(str(self)):
            self.filesystem.invalidate_cache()  # others write there too
            return bool(self.filesystem.exists(self.path))

    def stamp(self) -> str:  # noqa: D102
        with naming(str(self)):
            self.filesystem.invalidate_cache()
            size = self.filesystem.info(self.path)["size"]
            return f"{size}:{self.filesystem.checksum(self.path)}"

    def is_folder(self) -> bool:  # noqa: D102
        with naming(str(self)):
            return not self.filesystem.isfile(self.path) and bool(self.filesystem.isdir(self.path))

    def files(self) -> list[str]:  # noqa: D102
        with naming(str(self)):
            listing = self.filesystem.ls(self.path, detail=True)
        return sorted(e["name"].rpartition("/")[2] for e in listing if e["type"] == "file")

    def walk(self) -> list[str]:  # noqa: D102
        with naming(str(self)):
            found = self.filesystem.find(self.path)
        return sorted(str(path).removeprefix(self.path).lstrip("/") for path in found)

    def read(self) -> bytes:  # noqa: D102
        with naming(str(self)):
            return bytes(self.filesystem.cat_file(self.path))

    def open(self) -> Source:  # noqa: D102
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
        with naming(str(self)):
            self.filesystem.pipe_file(self.path, data)

    def send(self, path: Path) -> None:
        """Make this a copy of a file of this machine."""
        with naming(str(self)):
            self.filesystem.put_file(str(path), self.path)

    def remove(self) -> None:
        """Remove the file, or the folder and all that is in it, if there is one."""
        if self.exists():
            with naming(str(self)):
                self.filesystem.rm(self.path, recursive=True)


def local(path: StrPath) -> Path:
    """Return a path of this machine; raise if it is a URL."""
    if isinstance(path, str) and "://" in path:
        raise ConfigError(f"{path}: is a URL; this takes only files and folders of this machine")
    if path == "":
        raise ConfigError("an empty path names nothing")
    return Path(path)


def place(where: StrPath, *, storage_options: dict[str, Any] | None = None) -> Place:
    """Return the place that a path or URL names; `storage_options` go to the file system."""
    if not (isinstance(where, str) and "://" in where):
        return LocalPlace(local(where))
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
    return RemotePlace(filesystem, path.rstrip("/"))
