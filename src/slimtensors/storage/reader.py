"""Read safetensors files: one, a folder, or the shards that an index names."""

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from slimtensors.errors import CorruptFileError, FormatError
from slimtensors.storage import header as headers
from slimtensors.storage.header import Header, HeaderEntry
from slimtensors.storage.location import ByteSource, Location, StrPath
from slimtensors.tensor import is_valid_text

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""What transformers and its kin look for in a folder."""
INCOMPLETE = ".slimtensors-unfinished.json"
"""What lies in a folder elsewhere until it is complete: it cannot be renamed into place."""
DELTA = "delta.safetensors"
"""What they do not find: with this alone they stop, whatever it holds."""
DISTRIBUTED = "distributed.json"
"""What lies in a folder whose files hold the shards of many ranks."""


@dataclass(frozen=True)
class StoredFile:
    """An open safetensors file whose header has been checked against its size."""

    source: ByteSource
    header: Header
    text: bytes
    """The header as it stands in the file, without padding."""
    key: str
    """The file's name, relative to the folder of its index."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        return self.source.name

    def read(self, entry: HeaderEntry, size: int | None = None) -> memoryview:
        """Return the bytes of a stored tensor, or its first `size`; valid until `release`."""
        begin, end = self.header.size + entry.begin, self.header.size + entry.end
        return self.source.read(begin, end if size is None else min(begin + size, end))

    def read_part(self, entry: HeaderEntry, begin: int, end: int) -> memoryview:
        """Return some bytes of a stored tensor; valid until `release`."""
        start = self.header.size + entry.begin
        return self.source.read(start + begin, start + end)

    def release_part(self, entry: HeaderEntry, begin: int, end: int) -> None:
        """Say that these bytes of a stored tensor are no longer needed."""
        start = self.header.size + entry.begin
        self.source.release(start + begin, start + end)

    def release(self, entry: HeaderEntry) -> None:
        """Say that the bytes of a stored tensor are no longer needed."""
        self.source.release(self.header.size + entry.begin, self.header.size + entry.end)


def open_file(where: Location, key: str | None = None) -> StoredFile:
    """Open one file and check its header."""
    source = where.open()
    try:
        start = bytes(source.read(0, min(8, source.size)))
        size = headers.unpack_size(start, source.size)
        raw = bytes(source.read(0, size))
        header = headers.unpack(raw, source.size)
    except FormatError as error:
        raise type(error)(f"{source.name}: {error}") from error
    return StoredFile(source, header, raw[8:].rstrip(b" "), key or where.name)


def open_files(where: Location) -> list[StoredFile]:
    """Open a file, the files that an index names, or the model that a folder holds."""
    main = _main(where)
    if not main.name.endswith(".json"):
        return [open_file(main)]
    shards = read_index(main)
    files = [open_file(main.parent().child(key), key) for key in shards]
    for file, names in zip(files, shards.values(), strict=True):
        for name in names:
            if name not in file.header.entries:
                raise FormatError(f"{main}: {name}: should be in {file.name}, which has it not")
    return files


def weight_files(where: Location) -> list[str]:
    """Name the files that `where` stands for, relative to their folder: an index comes first."""
    main = _main(where)
    shards = read_index(main) if main.name.endswith(".json") else {}
    return [main.name, *shards]


def read_index(index: Location) -> dict[str, list[str]]:
    """Return the files that an index names, and the tensors that it says are in each."""
    shards: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(index.read())["weight_map"].items():
            shards.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{index}: not an index of shards: {error!r}") from error
    if not shards:
        raise CorruptFileError(f"{index}: the index names no file")
    for file in shards:
        if not is_inside(file):
            raise FormatError(f"{index}: {file!r} is not a file of this folder")
    return shards


def is_distributed(path: StrPath) -> bool:
    """Tell whether this is a local folder with the shards of many ranks."""
    return (Path(path) / DISTRIBUTED).is_file()


def is_inside(name: object) -> bool:
    """Tell whether `name` can only be a file below the folder in which it is said."""
    if not isinstance(name, str) or any(c in name for c in ":\\\0") or not is_valid_text(name):
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _main(where: Location) -> Location:
    return where.child(_main_file(where)) if where.is_folder() else where


def _main_file(folder: Location) -> str:
    files = folder.files()
    if INCOMPLETE in files:
        raise FormatError(
            f"{folder}: is not complete: its files are being written, or a run was stopped;"
            " the same command, run again, goes on with it"
        )
    for name in (SINGLE, INDEX, DELTA):
        if name in files:
            return name
    if DISTRIBUTED in files:
        raise FormatError(
            f"{folder}: is a distributed checkpoint: load it with dcp.load and"
            " slimtensors.distributed.StorageReader, or make a model folder of it with consolidate"
        )
    for ending in (".safetensors.index.json", ".safetensors"):
        found = [name for name in files if name.endswith(ending)]
        if len(found) == 1:
            return found[0]
        if found:
            raise FormatError(f"{folder}: which one? It holds {', '.join(found[:8])}")
    held = ", ".join(files[:8]) or "nothing"
    raise FormatError(f"{folder}: no safetensors files here; it holds {held}")
