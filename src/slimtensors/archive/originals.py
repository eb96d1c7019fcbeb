"""The plain files that an archive was made from: their headers, to write them again byte for byte.

A safetensors file is its header followed by its tensors at the offsets in that header. A manifest
therefore needs only the header, compressed, to describe the whole file.
"""

import base64
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from slimtensors.archive.dialects import PlainMember
from slimtensors.archive.read import Archive
from slimtensors.errors import CorruptFileError, FormatError
from slimtensors.storage import (
    SINGLE,
    HeaderEntry,
    is_inside,
    parse_header,
    parse_index,
    weight_files,
)
from slimtensors.tensor import Json, Spec

_LOG = logging.getLogger(__name__)

_ENDING = ".safetensors"
_SMALL = 1 << 20
_FACTOR = 4
"""Decompressed texts take at most `_SMALL` bytes plus `_FACTOR` times the headers of the files."""
_MIN_ENTRY = 40
"""Bytes that a stored tensor takes in a header beside its name, at least."""


@dataclass(frozen=True)
class Originals:
    """Headers and index of plain safetensors files."""

    headers: Mapping[str, bytes]
    """File name -> first bytes of the file: length of the header, and the header with padding."""
    index: tuple[str, bytes] | None = None
    """Name and content of the index."""
    stored_in: str = field(default="", compare=False)
    """The file whose manifest contains them, for messages."""

    @cached_property
    def entries(self) -> dict[str, dict[str, HeaderEntry]]:
        """File name -> entries of its header."""
        return {file: self._parse(file, raw) for file, raw in self.headers.items()}

    def matches(self, other: "Originals") -> bool:
        """Return True if the files are equal, apart from the name of a single file."""
        if self.index is None and other.index is None and len(self.headers) == 1:
            return [*self.headers.values()] == [*other.headers.values()]
        return self.headers == other.headers and self.index == other.index

    def check_parses(self) -> None:
        """Raise if a header is malformed."""
        _ = self.entries

    def check_not_empty(self) -> None:
        """Raise if one of several files has no tensors: a small header could list any number."""
        for file, table in self.entries.items():
            if not table and len(self.headers) > 1:
                raise CorruptFileError(self._name(f"{file}: contains no tensors"))

    def describe_all(self, specs: Mapping[str, Spec], tied: Mapping[str, str]) -> bool:
        """Return True if the files contain each tensor of `specs`, or the one it is tied to.

        Raise if an entry is not one of these tensors, or the index does not fit.
        """
        found: set[str] = set()
        for file, table in self.entries.items():
            for name, entry in table.items():
                if name in found:
                    raise CorruptFileError(self._name(f"{file}: {name}: duplicate tensor"))
                if specs.get(name) != entry.spec:
                    raise CorruptFileError(
                        self._name(f"{file}: {name}: does not match the stored tensor")
                    )
                found.add(name)
        if not all(name in found or tied.get(name) in found for name in specs):
            return False
        if self.index is not None:
            self._check_index(*self.index)
        return True

    def _check_index(self, index: str, text: bytes) -> None:
        file_of = {name: file for file, table in self.entries.items() for name in table}
        for file, names in parse_index(text, self._name(index)).items():
            if any(file_of.get(name) != file for name in names):
                raise CorruptFileError(self._name(f"{index}: does not match the headers"))

    def divide(self, files: Sequence[str]) -> dict[str, "Originals"]:
        """Return {file: headers that it is to store}: that of its name; the first file, others."""
        first = files[0]
        parts: dict[str, dict[str, bytes]] = {file: {} for file in files}
        for name, raw in self.headers.items():
            parts[name if name in parts else first][name] = raw
        return {
            file: Originals(headers, self.index if file == first else None)
            for file, headers in parts.items()
        }

    def to_json(self) -> Json:
        """Return the value of the manifest key `source`."""
        data: Json = {"files": {name: pack_text(raw) for name, raw in self.headers.items()}}
        if self.index is not None:
            name, text = self.index
            data["index"] = {name: pack_text(text)}
        return data

    @property
    def _size(self) -> int:
        return sum(map(len, self.headers.values())) + len(self.index[1] if self.index else b"")

    def fits(self, data: Json, names: Sequence[str]) -> bool:
        """Return True if readers accept `data`, the JSON form, beside tensors with these names."""
        packed = sum(len(text) for table in data.values() for text in table.values())
        return self._size <= text_limit(packed + sum(len(name) + _MIN_ENTRY for name in names))

    def _parse(self, file: str, raw: bytes) -> dict[str, HeaderEntry]:
        try:
            if int.from_bytes(raw[:8], "little") != len(raw) - 8:
                raise CorruptFileError("wrong length of the header")
            return parse_header(raw, None).entries
        except FormatError as error:
            raise type(error)(self._name(f"{file}: {error}")) from error

    def _name(self, message: str) -> str:
        return f"{self.stored_in}: source: {message}"


def find_originals(archive: Archive) -> Originals | None:
    """Return the files from which an archive was made, or its own files if they are plain.

    None if the archive does not describe them completely. Raises if what it describes is invalid.
    """
    originals = read_originals(archive) or _describe_files(archive)
    if originals is None:
        return None
    specs = {name: archive.spec(name) for name in archive}
    return originals if originals.describe_all(specs, archive.tied()) else None


def read_originals(archive: Archive) -> Originals | None:
    """Return what the manifests contain, not compared with the tensors; None if nothing."""
    budget = _Budget(text_limit(sum(file.header.size for file in archive.files)))
    headers: dict[str, bytes] = {}
    index: tuple[str, bytes] | None = None
    for file, data in archive.sources.items():
        try:
            found = _unpack_all(data.get("files"), _ENDING, budget)
            indexes = _unpack_all(data.get("index", {}), ".json", budget)
        except CorruptFileError as error:
            raise CorruptFileError(f"{file}: source: {error}") from error
        if headers.keys() & found.keys() or len(indexes) + (index is not None) > 1:
            raise CorruptFileError(f"{file}: source: a file is described twice")
        headers |= found
        index = next(iter(indexes.items()), index)
    if not headers:
        return None
    originals = Originals(headers, index, ", ".join(archive.sources))
    originals.check_not_empty()
    return originals


def store_originals(originals: Originals | None, names: Sequence[str], path: str) -> Json | None:
    """Return the manifest key `source` for these tensors; None, with a warning, if too large."""
    if originals is None:
        return None
    data = originals.to_json()
    if originals.fits(data, names):
        return data
    _LOG.warning("%s: the header is too large to keep; decompress will write another one", path)
    return None


def _describe_files(archive: Archive) -> Originals | None:
    """Return the files of an archive; None if they are more, or other, than its plain tensors."""
    if archive.residuals is not None:
        return None
    plain = {
        (member.file.key, name)
        for name in archive
        if isinstance(member := archive.member(name), PlainMember)
    }
    for file in archive.files:
        if any((file.key, name) not in plain for name in file.header.entries):
            return None
    index = None
    if archive.has_index:
        main = weight_files(archive.location)[0]
        location = archive.location
        folder = location if location.is_folder() else location.parent()
        index = (main, folder.child(main).read())
    headers = {file.key: file.raw_header for file in archive.files}
    if not all(is_inside(name) and name.endswith(_ENDING) for name in headers):
        if index is not None or len(headers) > 1:
            return None
        headers = dict.fromkeys([SINGLE], *headers.values())  # readers choose its name anyway
    return Originals(headers, index, archive.path)


def unpack_text(text: str, limit: int) -> bytes:
    """Return the bytes that `pack_text` received; raise if they are more than `limit`."""
    try:
        stream = zlib.decompressobj()
        data = stream.decompress(base64.b64decode(text, validate=True), limit + 1)
    except (ValueError, zlib.error) as error:
        raise CorruptFileError(f"invalid compressed text: {error}") from error
    if len(data) > limit:
        raise CorruptFileError(f"compressed text is larger than the limit of {limit} bytes")
    if not stream.eof or stream.unused_data:
        raise CorruptFileError("invalid compressed text: truncated, or more than one stream")
    return data


def pack_text(data: bytes) -> str:
    """Return bytes compressed and as text, for JSON."""
    return base64.b64encode(zlib.compress(data, 9)).decode()


def text_limit(stored_bytes: int) -> int:
    """Return how many bytes a reader unpacks from a header or document of `stored_bytes`."""
    return _SMALL + _FACTOR * stored_bytes


@dataclass
class _Budget:
    left: int

    def unpack(self, text: str) -> bytes:
        """Return the decompressed bytes; raise if they exceed what is left."""
        data = unpack_text(text, self.left)
        self.left -= len(data)
        return data


def _unpack_all(table: Any, ending: str, budget: _Budget) -> dict[str, bytes]:
    """Return the decompressed texts by file name; raise if the table is malformed."""
    if not isinstance(table, dict) or not all(isinstance(text, str) for text in table.values()):
        raise CorruptFileError("expected file names and compressed texts")
    for name in table:
        if not is_inside(name) or not name.endswith(ending):
            raise CorruptFileError(f"invalid file name {name!r}")
    return {name: budget.unpack(text) for name, text in table.items()}
