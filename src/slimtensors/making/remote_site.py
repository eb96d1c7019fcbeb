"""A folder made in one of fsspec's file systems, where nothing can be renamed."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from slimtensors.container import UNFINISHED, LocalPlace, Place, RemotePlace, StrPath
from slimtensors.errors import ConfigError, FormatError
from slimtensors.making.record import Record
from slimtensors.making.site import Kind, Write, check_same, is_same
from slimtensors.spec import Json

_WORK = ".slimtensors-work"


class RemoteSite:
    """A folder that says it is not complete until it is.

    Each file is written on this machine, sent, and removed here. A folder that is replaced is gone
    from the beginning on.
    """

    def __init__(self, target: RemotePlace, sources: Sequence[StrPath], *, replace: bool) -> None:
        self._target, self._sources, self._replace = target, sources, replace
        self._mark, self._work = target.child(UNFINISHED), target.child(_WORK)

    def __str__(self) -> str:
        return str(self._target)

    def begin(self, job: Json | None) -> None:  # noqa: D102
        if any(self._target.lies_in(_folder_of(source)) for source in self._sources):
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
                self.place(kind, file).send(Path(name) / file)
        record = record.sealed({file: self.place(kind, file).stamp() for file in record.files})
        self._record(kind, key).write(record.to_text().encode())
        return record

    def place(self, kind: Kind, file: str) -> RemotePlace:  # noqa: D102
        return self._target.child(file) if kind == "files" else self._work.child(f"parts/{file}")

    def copy(self, name: str, original: Place) -> None:  # noqa: D102
        if isinstance(original, LocalPlace):
            self._target.child(name).send(original.path)
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
        if any(self._target.holds(source) for source in self._sources):
            raise ConfigError(f"{self}: holds the source and cannot be replaced")
        if not any(name.endswith(".safetensors") for name in self._target.walk()):
            raise ConfigError(f"{self}: holds files, but no model, and is not replaced")

    def _clear(self, job: Json | None) -> None:
        """Remove what is there, the mark last of all: what is left cannot be taken for a model."""
        self._mark.write(json.dumps(job).encode())
        for name in self._target.walk():
            if name != UNFINISHED:
                self._target.child(name).remove()

    def _record(self, kind: Kind, key: str) -> RemotePlace:
        return self._work.child(f"records/{kind}/{key}.json")


def _folder_of(source: StrPath) -> str:
    text = str(source).rstrip("/")
    return text.rpartition("/")[0] if text.endswith((".json", ".safetensors")) else text
