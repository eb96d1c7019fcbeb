"""Read safetensors files: one, a folder, or the shards that an index names."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath

from slimtensors.container import header as headers
from slimtensors.container.header import Entry, Header
from slimtensors.container.place import Place
from slimtensors.container.source import Source
from slimtensors.errors import CorruptFileError, FormatError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""What transformers and its kin look for in a folder."""


@dataclass(frozen=True)
class StoredFile:
    """An open safetensors file whose header has been checked against its size."""

    source: Source
    header: Header
    text: bytes
    """The header as it stands in the file, without padding."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        return self.source.name

    def read(self, entry: Entry) -> memoryview:
        """Return the bytes of a stored tensor, valid until `release`."""
        return self.source.read(self.header.size + entry.begin, self.header.size + entry.end)

    def release(self, entry: Entry) -> None:
        """Say that the bytes of a stored tensor are no longer needed."""
        self.source.release(self.header.size + entry.begin, self.header.size + entry.end)


def open_file(where: Place) -> StoredFile:
    """Open one file and check its header."""
    source = where.open()
    try:
        start = bytes(source.read(0, min(8, source.size)))
        size = headers.unpack_size(start, source.size)
        raw = bytes(source.read(0, size))
        return StoredFile(source, headers.unpack(raw, source.size), raw[8:].rstrip(b" "))
    except FormatError as error:
        raise type(error)(f"{source.name}: {error}") from error


def open_files(where: Place) -> list[StoredFile]:
    """Open a file, the files that an index names, or the model that a folder holds."""
    return [open_file(found) for found in locate(where)]


def locate(where: Place) -> Iterator[Place]:
    """Yield the safetensors files that `where` stands for."""
    if where.is_folder():
        yield from locate(where.child(_main_file(where)))
    elif where.name.endswith(".json"):
        folder = where.parent()
        yield from (folder.child(name) for name in shard_names(where))
    else:
        yield where


def shard_names(index: Place) -> list[str]:
    """Return the files that an index names, each once and in order."""
    try:
        table = json.loads(index.read())
        names = list(dict.fromkeys(table["weight_map"].values()))
        if not names:
            raise CorruptFileError(f"{index}: the index names no file")
        for name in names:
            _check_inside(name)
    except FormatError as error:
        raise type(error)(f"{index}: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{index}: not an index of shards: {error!r}") from error
    return names


def _check_inside(name: object) -> None:
    path = PurePosixPath(name) if isinstance(name, str) else PurePosixPath("/")
    bad = path.is_absolute() or ".." in path.parts or not path.parts
    if bad or not isinstance(name, str) or any(c in name for c in ":\\\0"):
        raise FormatError(f"{name!r} is not a file of this folder")


def _main_file(folder: Place) -> str:
    files = folder.files()
    for name in (SINGLE, INDEX):
        if name in files:
            return name
    for ending in (".safetensors.index.json", ".safetensors"):
        found = [name for name in files if name.endswith(ending)]
        if len(found) == 1:
            return found[0]
        if found:
            raise FormatError(f"{folder}: which one? It holds {', '.join(found[:8])}")
    held = ", ".join(files[:8]) or "nothing"
    raise FormatError(f"{folder}: no safetensors files here; it holds {held}")
