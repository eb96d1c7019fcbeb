"""Read safetensors files: a single file, a folder, or the shards listed in an index."""

import errno
import json
import struct
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from slimtensors.errors import CorruptFileError, FormatError, MissingFileError, MixedShardsError
from slimtensors.storage.files import StrPath
from slimtensors.storage.foreign import explain_file, explain_folder
from slimtensors.storage.location import (
    ByteSource,
    Location,
    RemoteLocation,
    is_url,
    locate_folder,
)
from slimtensors.tensor import Json, Spec, is_valid_text, parse_shape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
"""The file names that transformers and other loaders look for."""
DELTA = "delta.safetensors"
"""File name of a delta. Other loaders do not find it, so they cannot misread it as a model."""
DISTRIBUTED = "distributed.json"
"""Manifest of a distributed checkpoint, a folder with the shards of many ranks."""
INCOMPLETE = ".slimtensors-unfinished.json"
"""Marker of an incomplete remote folder, which cannot be renamed when it is complete."""

_ATTEMPTS = 16
_PAUSE = 0.002
"""How often, and after how many seconds, files that were replaced are opened again."""

MAX_HEADER = 100_000_000
"""Maximum size of a header that safetensors readers accept."""

_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
DTYPE_OF_CODE: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _CODES.items() if hasattr(torch, name)
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
PACKED_PAIR = DTYPE_OF_CODE.get("F4")
"""A dtype with two numbers per item: safetensors counts the numbers, torch the items."""

_NOT_FOUND = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP)
"""Error numbers for a name that is not that of a file."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A stored tensor: its spec, and its byte range after the header."""

    spec: Spec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """All entries of a file in the stored order, and its metadata."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    size: int
    """Bytes before the first tensor."""


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

    @property
    def raw_header(self) -> bytes:
        """The first bytes of the file: length of the header, and the header with padding."""
        width = self.header.size - 8
        return struct.pack("<Q", width) + self.text.ljust(width)

    def read(self, entry: HeaderEntry, size: int | None = None) -> memoryview:
        """Return the bytes of a stored tensor, or the first `size`; valid until `release`."""
        begin, end = self.header.size + entry.begin, self.header.size + entry.end
        return self.source.read(begin, end if size is None else min(begin + size, end))

    def read_starts(self, entries: Iterable[HeaderEntry], size: int) -> Iterator[memoryview]:
        """Yield the first `size` bytes of each stored tensor."""
        spans = ((self.header.size + entry.begin, entry) for entry in entries)
        return self.source.read_ranges(
            (begin, min(begin + size, self.header.size + entry.end)) for begin, entry in spans
        )

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
        size = _parse_header_size(start, source.size, source.name)
        raw = bytes(source.read(0, size))
        header = parse_header(raw, source.size)
    except FormatError as error:
        raise type(error)(f"{source.name}: {error}") from error
    return StoredFile(source, header, raw[8:].rstrip(b" "), key or where.name)


FindGeneration = Callable[[StoredFile], str | None]
"""Returns the text that all shards of one save share, or None if the file has none."""


def open_files(where: Location, find_generation: FindGeneration) -> list[StoredFile]:
    """Open a file, the files listed in an index, or the model in a folder.

    All files are of one save: if another process replaces them meanwhile, they are opened again.
    """

    def open_model() -> list[StoredFile] | None:
        with where.pin() as place:
            main = _find_main(place)
            if not main.name.endswith(".json"):
                return [open_file(main)]
            index, shards = main.identity(), read_index(main)
            places = [main.parent().child(key) for key in shards]
            files = [_open_shard(main, key) for key in shards]
            _check_entries(main, files, shards)
            if _have_generation(files, find_generation):
                return files
            identities = [index, *(file.source.identity for file in files)]
            return files if _are_unchanged([main, *places], identities) else None

    def identify() -> object:
        try:
            main = _find_main(where)
        except (OSError, FormatError):
            return None
        identity = main.identity()
        return None if identity is None else (main.name, identity)

    return _open_again_if_replaced(where, open_model, identify)


def open_listed(places: Sequence[Location], find_generation: FindGeneration) -> list[StoredFile]:
    """Open these files of one model; an index is ignored."""

    def open_all() -> list[StoredFile] | None:
        files = [open_file(place) for place in places]
        if len(files) == 1 or _have_generation(files, find_generation):
            return files
        return files if _are_unchanged(places, [file.source.identity for file in files]) else None

    def identify() -> object:
        return [place.identity() for place in places]

    return _open_again_if_replaced(places[0], open_all, identify)


def _open_again_if_replaced(
    where: Location,
    open_all: Callable[[], list[StoredFile] | None],
    identify: Callable[[], object],
) -> list[StoredFile]:
    """Return `open_all()`; call it again if it returns None or fails after a replacement.

    `identify` returns another value after a replacement, or None if that is unknown.
    """
    for attempt in range(1, _ATTEMPTS):
        before = identify()
        try:
            if (files := open_all()) is not None:
                return files
        except (FileNotFoundError, FormatError):
            if before is not None and identify() == before:
                raise
        time.sleep(_PAUSE * attempt)
    if (files := open_all()) is None:
        raise MixedShardsError(f"{where} is replaced again and again while it is opened")
    return files


def _check_entries(
    main: Location, files: Sequence[StoredFile], shards: Mapping[str, Sequence[str]]
) -> None:
    for file, names in zip(files, shards.values(), strict=True):
        for name in names:
            if name not in file.header.entries:
                raise FormatError(f"{main}: {name}: in the index, but not found in {file.name}")


def _have_generation(files: Sequence[StoredFile], find_generation: FindGeneration) -> bool:
    """Return True if all files have the same generation, False if none has one; else raise."""
    found = [find_generation(file) for file in files]
    for file, generation in zip(files, found, strict=True):
        if generation != found[0]:
            raise MixedShardsError(
                f"{file.name} and {files[0].name} are shards of different saves; save or download"
                " the model again"
            )
    return found[0] is not None


def _are_unchanged(places: Sequence[Location], identities: Sequence[object]) -> bool:
    """Return True if these are still the files that were opened, as far as that is known."""
    pairs = zip(places, identities, strict=True)
    return all(identity is None or place.identity() == identity for place, identity in pairs)


def _open_shard(index: Location, key: str) -> StoredFile:
    shard = index.parent().child(key)
    try:
        return open_file(shard, key)
    except OSError as error:
        if error.errno not in _NOT_FOUND and not isinstance(error, FileNotFoundError):
            raise
        raise MissingFileError(f"{index}: {shard} is listed, but not found") from error


def weight_files(where: Location) -> list[str]:
    """List the weight files of `where`, relative to their folder; an index is first."""
    main = _find_main(where)
    shards = read_index(main) if main.name.endswith(".json") else {}
    return [main.name, *shards]


def read_index(index: Location) -> dict[str, list[str]]:
    """Return the files listed in an index, and the tensors in each."""
    return parse_index(index.read(), str(index))


def parse_index(text: bytes, index: str) -> dict[str, list[str]]:
    """Return the files listed in the `text` of an index, and the tensors in each."""
    shards: dict[str, list[str]] = {}
    try:
        for name, file in json.loads(text)["weight_map"].items():
            shards.setdefault(file, []).append(name)
    except KeyError as error:
        raise CorruptFileError(f"{index}: not an index of shards ({error} not found)") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CorruptFileError(f"{index}: invalid index of shards: {error!r}") from error
    if not shards:
        raise CorruptFileError(f"{index}: the index lists no files")
    for file in shards:
        if not is_inside(file):
            raise FormatError(f"{index}: {file!r} is not a file in this folder")
    return shards


def is_distributed(path: StrPath | RemoteLocation) -> bool:
    """Return True if this is a distributed checkpoint, local or remote."""
    where = locate_folder(path) if not isinstance(path, RemoteLocation) and is_url(path) else path
    if isinstance(where, RemoteLocation):
        return not where.is_http and (where / DISTRIBUTED).is_file()
    return (Path(where) / DISTRIBUTED).is_file()


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
            f"{folder} is incomplete: it is being written, or a run was interrupted;"
            " run the same command again to continue"
        )
    for name in (SINGLE, INDEX, DELTA):
        if name in files:
            return name
    if DISTRIBUTED in files:
        raise FormatError(
            f"{folder} is a distributed checkpoint; load it with dcp.load and"
            " slimtensors.distributed.StorageReader, or convert it with consolidate"
        )
    if reason := explain_folder(str(folder), files, _walk_shallow(folder, files)):
        raise FormatError(reason)
    for suffix in (".safetensors.index.json", ".safetensors"):
        found = [name for name in files if name.endswith(suffix)]
        if len(found) == 1:
            return found[0]
        if found:
            raise FormatError(f"{folder}: several models found, name one of {', '.join(found[:8])}")
    content = ", ".join(files[:8]) or "nothing"
    raise FormatError(f"{folder}: no safetensors files found; the folder contains {content}")


def _walk_shallow(folder: Location, files: Sequence[str]) -> list[str]:
    """Return the paths of all files in a folder, unless it contains a model."""
    has_model = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in files)
    return list(files) if has_model else folder.walk()


def _parse_header_size(start: bytes, available: int, name: str) -> int:
    """Return the size of the header from the first 8 bytes of a file of `available` bytes."""
    if len(start) < 8:
        raise CorruptFileError(f"truncated: {available} bytes are too few for a safetensors file")
    (width,) = struct.unpack_from("<Q", start)
    if width > MAX_HEADER:
        raise FormatError(
            explain_file(start, name) or f"not a safetensors file (header of {width} bytes)"
        )
    if 8 + width > available:
        raise CorruptFileError(f"truncated: header of {width} bytes in a file of {available} bytes")
    return 8 + int(width)


def parse_header(raw: bytes, available: int | None) -> Header:
    """Parse a header and check it against the size of the file, if that is given."""
    try:
        table = json.loads(raw[8:].decode(), object_pairs_hook=_reject_duplicates)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise CorruptFileError("the header is not a JSON object")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFileError("__metadata__ in the header is not a JSON object of strings")
    try:
        "".join(table).encode()
    except UnicodeEncodeError as error:
        raise CorruptFileError(f"a tensor name is not valid Unicode: {error}") from error
    entries = {name: _parse_entry(name, data) for name, data in table.items()}
    _check_tiling(entries, None if available is None else available - len(raw))
    return Header(entries, metadata, len(raw))


def _parse_entry(name: str, data: Any) -> HeaderEntry:
    try:
        code, sizes, (begin, end) = data["dtype"], data["shape"], data["data_offsets"]
        dtype = DTYPE_OF_CODE[code]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{name}: invalid header entry: {str(data)[:120]}") from error
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise CorruptFileError(f"{name}: invalid offsets {str(data['data_offsets'])[:80]}")
    try:
        shape = parse_shape(sizes)
    except FormatError as error:
        raise CorruptFileError(f"{name}: {error}") from error
    if dtype == PACKED_PAIR:
        if not shape or shape[-1] % 2:
            raise CorruptFileError(f"{name}: odd number of 4-bit items in a row")
        shape = (*shape[:-1], shape[-1] // 2)
    spec = Spec(dtype, shape)
    if spec.nbytes != end - begin:
        raise CorruptFileError(
            f"{name}: expected {spec.nbytes} bytes for its shape, got {end - begin}"
        )
    return HeaderEntry(spec, begin, end)


def _check_tiling(entries: Mapping[str, HeaderEntry], available: int | None) -> None:
    """Raise unless the tensors cover the data exactly, without gaps or overlaps."""
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != expected:
            problem = "overlaps its neighbour" if entry.begin < expected else "leaves a gap"
            raise CorruptFileError(
                f"{name}: {problem}: expected offset {expected}, got {entry.begin}"
            )
        expected = entry.end
    if available is not None and expected != available:
        problem = "truncated" if expected > available else "bytes that belong to no tensor"
        raise CorruptFileError(f"{problem}: expected {expected} bytes of data, got {available}")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    table = dict(pairs)
    if len(table) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise CorruptFileError(f"{name}: duplicate name in the header")
    return table
