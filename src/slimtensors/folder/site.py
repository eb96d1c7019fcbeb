"""Build folders: hidden until complete, local or remote, resumable."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Literal, Protocol

from slimtensors import _core
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.folder.weights import Record
from slimtensors.storage import (
    INCOMPLETE,
    LocalLocation,
    Location,
    RemoteLocation,
    StrPath,
    remove_leftovers,
    temporary_folder,
)
from slimtensors.storage.atomic import (
    check_replaceable,
    commit_folder,
    lock_folder,
    write_file_atomically,
)
from slimtensors.tensor import Json

Kind = Literal["files", "parts"]
"""Files of the folder itself, or parts of them that are yet to be joined."""

Write = Callable[[Path], Record]
"""Writes files into a folder of this machine, and returns what they are, without their seals."""

_CHUNK = 1 << 24


class Site(Protocol):
    """A folder in the making, as each of the processes sees it that make it."""

    def begin(self, job: Json | None) -> None:
        """Make room for a job, or go on with it if it was begun before; refuse to mix two."""
        ...

    def attach(self, job: Json | None) -> None:
        """Work on the job that another process has begun here; refuse any other."""
        ...

    def find(self, kind: Kind, key: str) -> Record | None:
        """Return what is finished, if its files still are what they were; else forget it."""
        ...

    def load(self, kind: Kind, key: str) -> Record:
        """Return what is finished, without looking at its files."""
        ...

    def has(self, kind: Kind, key: str) -> bool:
        """Tell whether something is finished."""
        ...

    def put(self, kind: Kind, key: str, write: Write) -> Record:
        """Let `write` make files, keep them, and remember what they are."""
        ...

    def place(self, kind: Kind, file: str) -> Location:
        """Return where a file lies."""
        ...

    def copy(self, name: str, original: Location) -> None:
        """Add a copy of a file to the folder."""
        ...

    def write(self, name: str, data: bytes) -> None:
        """Add a small file to the folder."""
        ...

    def commit(self) -> None:
        """Let readers see the folder."""
        ...

    def drop(self) -> None:
        """Remove everything, as if there had been no attempt."""
        ...

    def close(self) -> None:
        """Let others work here."""
        ...


class LocalSite:
    """A folder of this machine, or of a disk that several machines share."""

    def __init__(self, target: Path, sources: Sequence[StrPath], *, replace: bool) -> None:
        self._target = Path(os.path.realpath(target))
        self._sources, self._replace = sources, replace
        self._work = self._target.with_name(f".{self._target.name}.slimtensors-work")
        self._goes_on = True
        self._resources = ExitStack()

    def __str__(self) -> str:
        return str(self._work)

    def begin(self, job: Json | None) -> None:  # noqa: D102
        check_replaceable(self._target, self._sources, replace=self._replace)
        self._goes_on = job is not None
        if self._goes_on:
            self._work.mkdir(parents=True, exist_ok=True)
            remove_leftovers(self._target)
        else:  # a place of its own
            self._work = self._resources.enter_context(temporary_folder(self._target))
        self._resources.enter_context(lock_folder(self._work))
        known = self._work / "job.json"
        if known.exists() and not is_same(job, known.read_bytes(), str(self), self._replace):
            shutil.rmtree(self._work / "records", ignore_errors=True)
        self._remove_unfinished()
        known.write_text(json.dumps(job))

    def attach(self, job: Json | None) -> None:  # noqa: D102
        check_same(job, (self._work / "job.json").read_bytes(), str(self))

    def find(self, kind: Kind, key: str) -> Record | None:  # noqa: D102
        if not self.has(kind, key):
            return None
        try:
            record = self.load(kind, key)
            is_whole = all(
                _seal(self._work / kind / file) == seal for file, seal in record.files.items()
            )
        except (OSError, FormatError):
            is_whole = False
        if not is_whole:
            self._record(kind, key).unlink()
        return record if is_whole else None

    def load(self, kind: Kind, key: str) -> Record:  # noqa: D102
        return Record.from_text(self._record(kind, key).read_bytes())

    def has(self, kind: Kind, key: str) -> bool:  # noqa: D102
        return self._record(kind, key).exists()

    def put(self, kind: Kind, key: str, write: Write) -> Record:  # noqa: D102
        folder = self._work / kind
        folder.mkdir(exist_ok=True)
        record = write(folder)
        if self._goes_on:
            record = record.sealed({file: _seal(folder / file) for file in record.files})
        path = self._record(kind, key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file_atomically(path, record.to_text().encode())
        return record

    def place(self, kind: Kind, file: str) -> Location:  # noqa: D102
        return LocalLocation(self._work / kind / file)

    def copy(self, name: str, original: Location) -> None:  # noqa: D102
        path = self._file(name)
        if isinstance(original, LocalLocation):
            shutil.copy(original.path, path)
        else:
            path.write_bytes(original.read())

    def write(self, name: str, data: bytes) -> None:  # noqa: D102
        write_file_atomically(self._file(name), data)

    def commit(self) -> None:  # noqa: D102
        commit_folder(self._work / "files", self._target, replace=self._replace)
        self.drop()

    def drop(self) -> None:  # noqa: D102
        shutil.rmtree(self._work, ignore_errors=True)

    def close(self) -> None:  # noqa: D102
        self._resources.close()

    def _remove_unfinished(self) -> None:
        """Remove what no record knows: a process was killed before it was complete."""
        for kind in ("files", "parts"):
            finished: set[Path] = set()
            for text in (self._work / "records" / kind).rglob("*.json"):
                with suppress(FormatError):  # `find` will see that
                    files = Record.from_text(text.read_bytes()).files
                    finished |= {self._work / kind / file for file in files}
            for path in (self._work / kind).rglob("*"):
                if path.is_file() and path not in finished:
                    path.unlink()

    def _file(self, name: str) -> Path:
        path = self._work / "files" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _record(self, kind: Kind, key: str) -> Path:
        return self._work / "records" / kind / f"{key}.json"


def is_same(job: Json | None, text: bytes, where: str, replace: bool) -> bool:
    """Tell whether a job was begun before; raise if it was another one, unless that may go."""
    try:
        before = json.loads(text)
    except ValueError:
        before = None  # killed while it was written
    told = _difference(before, job)
    if told and isinstance(before, dict) and not replace:
        raise ConfigError(
            f"{where}: holds what another run has finished: {told}; remove it, or -f starts anew"
        )
    return not told


def check_same(job: Json | None, text: bytes, where: str) -> None:
    """Raise if two processes of one run see different jobs."""
    if told := _difference(json.loads(text), job):
        raise MismatchError(f"{where}: this rank is not of the run that is under way: {told}")


def _difference(before: Json | None, now: Json | None) -> str:
    now = json.loads(json.dumps(now))
    if before == now:
        return ""
    then, here = before or {}, now or {}
    key = next(key for key in {**then, **here} if then.get(key) != here.get(key))
    return f"its {key} is {str(then.get(key))[:200]}, here it is {str(here.get(key))[:200]}"


def _seal(path: Path) -> str:
    """Return the size and the checksum of a file."""
    total = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            total = _core.crc32c(chunk, total)
        return f"{file.tell()}:{total:08x}"


_WORK = ".slimtensors-work"


class RemoteSite:
    """A folder that says it is not complete until it is.

    Each file is written on this machine, sent, and removed here. A folder that is replaced is gone
    from the beginning on.
    """

    def __init__(
        self, target: RemoteLocation, sources: Sequence[StrPath], *, replace: bool
    ) -> None:
        self._target, self._sources, self._replace = target, sources, replace
        self._mark, self._work = target.child(INCOMPLETE), target.child(_WORK)

    def __str__(self) -> str:
        return str(self._target)

    def begin(self, job: Json | None) -> None:  # noqa: D102
        if any(self._target.is_inside(_folder_of(source)) for source in self._sources):
            raise ConfigError(f"{self}: lies in the source's folder; name a place outside of it")
        if self._mark.exists():
            if not is_same(job, self._mark.read(), str(self), self._replace):
                self._clear(job)
        elif self._target.exists():
            self._check_replaceable()
            self._clear(job)
        self._mark.write(json.dumps(job).encode())

    def attach(self, job: Json | None) -> None:  # noqa: D102
        check_same(job, self._mark.read(), str(self))

    def find(self, kind: Kind, key: str) -> Record | None:  # noqa: D102
        if not self.has(kind, key):
            return None
        try:
            found = self.load(kind, key)
            is_whole = all(
                self.place(kind, file).stamp() == stamp for file, stamp in found.files.items()
            )
        except (OSError, FormatError):
            is_whole = False
        if not is_whole:
            self._record(kind, key).remove()
        return found if is_whole else None

    def load(self, kind: Kind, key: str) -> Record:  # noqa: D102
        return Record.from_text(self._record(kind, key).read())

    def has(self, kind: Kind, key: str) -> bool:  # noqa: D102
        return self._record(kind, key).exists()

    def put(self, kind: Kind, key: str, write: Write) -> Record:  # noqa: D102
        with tempfile.TemporaryDirectory(prefix="slimtensors-") as name:
            record = write(Path(name))
            for file in record.files:
                self.place(kind, file).upload(Path(name) / file)
        record = record.sealed({file: self.place(kind, file).stamp() for file in record.files})
        self._record(kind, key).write(record.to_text().encode())
        return record

    def place(self, kind: Kind, file: str) -> RemoteLocation:  # noqa: D102
        return self._target.child(file) if kind == "files" else self._work.child(f"parts/{file}")

    def copy(self, name: str, original: Location) -> None:  # noqa: D102
        if isinstance(original, LocalLocation):
            self._target.child(name).upload(original.path)
        else:
            self._target.child(name).write(original.read())

    def write(self, name: str, data: bytes) -> None:  # noqa: D102
        self._target.child(name).write(data)

    def commit(self) -> None:  # noqa: D102
        self._work.child("parts").remove()
        self._mark.remove()
        self._work.remove()

    def drop(self) -> None:  # noqa: D102
        self._target.remove()

    def close(self) -> None:  # noqa: D102
        pass

    def _check_replaceable(self) -> None:
        if not self._replace:
            raise ConfigError(f"{self}: exists already; pass replace=True")
        if not self._target.is_folder():
            raise ConfigError(f"{self}: is a file, not a folder")
        if any(self._target.contains(source) for source in self._sources):
            raise ConfigError(f"{self}: holds the source and cannot be replaced")
        if not any(name.endswith(".safetensors") for name in self._target.walk()):
            raise ConfigError(f"{self}: holds files, but no model, and is not replaced")

    def _clear(self, job: Json | None) -> None:
        """Remove what is there, the mark last of all: what is left cannot be taken for a model."""
        self._mark.write(json.dumps(job).encode())
        for name in self._target.walk():
            if name != INCOMPLETE:
                self._target.child(name).remove()

    def _record(self, kind: Kind, key: str) -> RemoteLocation:
        return self._work.child(f"records/{kind}/{key}.json")


def _folder_of(source: StrPath) -> str:
    text = str(source).rstrip("/")
    return text.rpartition("/")[0] if text.endswith((".json", ".safetensors")) else text
