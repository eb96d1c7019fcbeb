"""Read safetensors files: a single file, a folder, or the shards listed in an index."""

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
"""The file names that transformers and other loaders look for."""
DELTA = "delta.safetensors"
"""File name of a delta. Other loaders do not find it, so they cannot misread it as a model."""
DISTRIBUTED = "distributed.json"
"""Manifest of a distributed checkpoint, a folder with the shards of many ranks."""
INCOMPLETE = ".slimtensors-unfinished.json"
"""Marker of an incomplete remote folder, which cannot be renamed when it is complete."""


@dataclass(frozen=True)
class StoredFile:
    """An open safetensors file whose header has been checked against its size."""

    source: ByteSource
    header: Header
    text: bytes
    """The header as stored, without padding."""
    key: str
    """The file's name, relative to the folder of its index."""

    @property
    def name(self) -> str:
        """Path or URL, for messages."""
        return self.source.name

    def read(self, entry: HeaderEntry, size: int | None = None) -> memoryview:
        """Return the bytes of a stored tensor, or the first `size`; valid until `release`."""
        begin, end = self.header.size + entry.begin, self.header.size + entry.end
        return self.source.read(begin, end if size is None else min(begin + size, end))

    def read_part(self, entry: HeaderEntry, begin: int, end: int) -> memoryview:
        """Return a range of the bytes of a stored tensor; valid until `release_part`."""
        start = self.header.size + entry.begin
        return self.source.read(start + begin, start + end)

    def release_part(self, entry: HeaderEntry, begin: int, end: int) -> None:
        """Free the memory of a range of a stored tensor."""
        start = self.header.size + entry.begin
        self.source.release(start + begin, start + end)

    def release(self, entry: HeaderEntry) -> None:
        """Free the memory of a stored tensor."""
        self.source.release(self.header.size + entry.begin, self.header.size + entry.end)


def open_file(where: Location, key: str | None = None) -> StoredFile:
    """Open a file and check its header."""
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
    """Open a file, the files listed in an index, or the model in a folder."""
    main = _find_main(where)
    if not main.name.endswith(".json"):
        return [open_file(main)]
    shards = read_index(main)
    files = [open_file(main.parent().child(key), key) for key in shards]
    for file, names in zip(files, shards.values(), strict=True):
        for name in names:
            if name not in file.header.entries:
                raise FormatError(f"{main}: {name}: in the index, but not found in {file.name}")
    return files


def weight_files(where: Location) -> list[str]:
    """List the weight files of `where`, relative to their folder; an index is first."""
    main = _find_main(where)
    shards = read_index(main) if main.name.endswith(".json") else {}
    return [main.name, *shards]


def read_index(index: Location) -> dict[str, list[str]]:
    """Return the files listed in an index, and the tensors in each."""
    shards: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(index.read())["weight_map"].items():
            shards.setdefault(file, []).append(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{index}: invalid index of shards: {error!r}") from error
    if not shards:
        raise CorruptFileError(f"{index}: the index lists no files")
    for file in shards:
        if not is_inside(file):
            raise FormatError(f"{index}: {file!r} is not a file in this folder")
    return shards


def is_distributed(path: StrPath) -> bool:
    """Return True if this is a local distributed checkpoint."""
    return (Path(path) / DISTRIBUTED).is_file()


def is_inside(name: object) -> bool:
    """Return True if `name` is a relative path that cannot leave its folder."""
    if not isinstance(name, str) or any(c in name for c in ":\\\0") or not is_valid_text(name):
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _find_main(where: Location) -> Location:
    """Return `where`, or the index or weight file in that folder."""
    return where.child(_choose_main(where)) if where.is_folder() else where


def _choose_main(folder: Location) -> str:
    files = folder.files()
    if INCOMPLETE in files:
        raise FormatError(
            f"{folder}: is not complete: it is being written, or a run was interrupted;"
            " run the same command again to continue"
        )
    for name in (SINGLE, INDEX, DELTA):
        if name in files:
            return name
    if DISTRIBUTED in files:
        raise FormatError(
            f"{folder}: is a distributed checkpoint; load it with dcp.load and"
            " slimtensors.distributed.StorageReader, or convert it with consolidate"
        )
    for suffix in (".safetensors.index.json", ".safetensors"):
        found = [name for name in files if name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise FormatError(f"{folder}: several models found, name one of {', '.join(found[:8])}")
    content = ", ".join(files[:8]) or "nothing"
    raise FormatError(f"{folder}: no safetensors files found; the folder contains {content}")
