"""Sealed JSON documents: read a file, check its checksum, and check every value on access."""

import json
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from slimtensors import _core
from slimtensors.errors import CorruptFileError, FormatError, report_malformed
from slimtensors.storage import Folder, open_for_reading
from slimtensors.tensor import is_valid_text

T = TypeVar("T")

_MAX_BYTES = 1 << 30
"""Size above which a document is refused instead of read into memory."""
MAX_BASES = 200
"""Largest number of bases between a delta and its keyframe."""
_MAX_NAME = 255
"""Bytes of a file name."""
_MAX_INTEGER = (1 << 63) - 1
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}
"""Numbers that JSON lacks, by the strings that represent them."""


def read_document(path: Folder) -> str:
    """Return the text of a regular file; raise `FormatError` for anything else."""
    raw = _read_bytes(path)
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise CorruptFileError(f"{path}: not UTF-8: {error}") from error


def _read_bytes(path: Folder) -> bytes:
    if not isinstance(path, Path):
        _check_size(path, path.size())
        return path.read()
    try:
        opened = open_for_reading(path)
    except IsADirectoryError:
        raise FormatError(f"{path} is a folder, not a regular file") from None
    with opened as file:
        _check_size(path, os.fstat(file.fileno()).st_size)
        return file.read()


def _check_size(path: Folder, size: int) -> None:
    if size > _MAX_BYTES:
        raise FormatError(f"{path}: {size} bytes are too large for a manifest")


def parse_document(folder: Folder, name: str, kind: str, parse: Callable[[str], T]) -> T:
    """Read and parse the document that makes a folder a checkpoint of some `kind`."""
    path = folder / name
    try:
        text = read_document(path)
    except NotADirectoryError:
        raise FormatError(f"{folder} is not a {kind} (not a folder)") from None
    except FileNotFoundError:
        if not folder.exists():
            raise FileNotFoundError(f"{folder}: no such checkpoint") from None
        raise FormatError(f"{folder} is not a {kind} ({name} not found)") from None
    with report_malformed(str(path)):
        return parse(text)


def seal(body: str, separator: str) -> str:
    """Return a JSON text with its CRC-32C as the last key; `body` lacks the closing brace."""
    return f"{body}{separator}{_core.crc32c(body.encode())}\n}}\n"


def is_sealed(text: str, separator: str) -> bool:
    """Return True if a text ends with its own checksum."""
    body, _, checksum = text.rpartition(separator)
    return bool(body) and checksum == f"{_core.crc32c(body.encode())}\n}}\n"


def parse_object(text: str, kind: str, *, strict: Callable[[int], bool]) -> "Fields":
    """Parse a document of this `format`; its version decides whether bare NaN is refused.

    Raise `CorruptFileError` unless it is an object with a valid `format` and `version`.
    """
    constants: list[str] = []

    def keep(name: str) -> float:
        constants.append(name)
        return _SPECIAL[name]

    data = json.loads(text, parse_constant=keep)
    if not isinstance(data, dict) or data.get("format") != kind:
        raise CorruptFileError(f"not the manifest of a {kind.removeprefix('slimtensors ')}")
    fields = Fields(data)
    if strict(fields.integer("version", low=1)) and constants:
        raise CorruptFileError(f"{constants[0]} is not valid JSON")
    return fields


@dataclass(frozen=True)
class Fields:
    """A JSON object whose values are checked when they are read; errors name the key."""

    data: Mapping[str, Any]
    where: str = ""
    """Prefix of the keys in messages."""

    def check_keys(self, required: Collection[str], optional: Collection[str] = ()) -> None:
        """Raise unless all required keys and no unknown ones are present."""
        for key in sorted(required):
            if key not in self.data:
                raise CorruptFileError(f"{self.where}{key}: missing")
        for key in self.data:
            if key not in required and key not in optional:
                raise CorruptFileError(f"{self.where}{_shorten(key)}: unknown key")

    def explain(self, key: str, expected: str) -> str:
        """Return the message about an invalid or missing value."""
        where = f"{self.where}{_shorten(key)}"
        if key not in self.data:
            return f"{where}: missing"
        return f"{where}: expected {expected}, got {_shorten(self.data[key])}"

    def text(self, key: str) -> str:
        """Return a string."""
        value = self.data.get(key)
        if not isinstance(value, str) or not is_valid_text(value):
            raise CorruptFileError(self.explain(key, "text"))
        return value

    def folder_name(self, key: str) -> str:
        """Return the name of a sibling folder: no path, no hidden name."""
        value = self.text(key)
        if not is_plain_name(value):
            raise CorruptFileError(self.explain(key, "the name of a folder"))
        return value

    def integer(self, key: str, *, low: int = -_MAX_INTEGER, high: int = _MAX_INTEGER) -> int:
        """Return an integer in a range."""
        value = self.data.get(key)
        if type(value) is not int or not low <= value <= high:
            bounds = (
                f" from {low} to {high}" if (low, high) != (-_MAX_INTEGER, _MAX_INTEGER) else ""
            )
            raise CorruptFileError(self.explain(key, f"an integer{bounds}"))
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return an integer or None."""
        return None if self.data.get(key, 0) is None else self.integer(key)

    def number(self, key: str) -> float:
        """Return a number; strings represent NaN and infinities."""
        value = self.data.get(key)
        if type(value) is str and value in _SPECIAL:
            return _SPECIAL[value]
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise CorruptFileError(self.explain(key, "a number"))
        try:
            return float(value)
        except OverflowError:
            raise CorruptFileError(self.explain(key, "a number that fits a double")) from None

    def finite_number(self, key: str) -> float:
        """Return a number that is neither NaN nor infinite."""
        value = self.number(key)
        if isinstance(self.data[key], str) or not math.isfinite(value):
            raise CorruptFileError(self.explain(key, "a finite number"))
        return value

    def child(self, key: str) -> "Fields":
        """Return an object."""
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise CorruptFileError(self.explain(key, "an object"))
        return Fields(value, f"{self.where}{_shorten(key)}: ")

    def items(self, key: str) -> list[Any]:
        """Return a list; its items are not checked."""
        value = self.data.get(key)
        if not isinstance(value, list):
            raise CorruptFileError(self.explain(key, "a list"))
        return value

    def table(self, key: str, parse: "Callable[[Fields, str], T]") -> dict[str, T]:
        """Return an object with values of one kind: `table("metrics", Fields.number)`."""
        rows = self.child(key)
        for name in rows.data:
            if not is_valid_text(name):
                raise CorruptFileError(f"{rows.where}{name!a}: not valid text")
        return {name: parse(rows, name) for name in rows.data}


def check_chain(folder: Folder, deltas: Sequence[Folder]) -> None:
    """Raise if the base `folder` of these deltas is one of them, or if the chain is too long."""
    chain = [*deltas, folder]
    real = [os.path.realpath(path) if isinstance(path, Path) else path for path in chain]
    if real[-1] in real[:-1]:
        cycle = " -> ".join(path.name for path in (*deltas[real.index(real[-1]) :], folder))
        raise CorruptFileError(f"{folder}: the bases form a cycle: {cycle}")
    if len(deltas) > MAX_BASES:
        raise CorruptFileError(
            f"{deltas[0]}: a chain of more than {MAX_BASES} bases; save in full more often"
        )


def format_number(value: float) -> float | str:
    """Return a number for strict JSON: NaN and infinities as strings."""
    if math.isfinite(value):
        return value
    return next(name for name, number in _SPECIAL.items() if repr(number) == repr(value))


def is_plain_name(name: str) -> bool:
    """Return True if this is a name inside a folder: not a path, not hidden."""
    is_short = 0 < len(name.encode()) <= _MAX_NAME
    return is_short and not name.startswith(".") and not set(name) & set("/\\\0")


def _shorten(value: object) -> str:
    text = value if isinstance(value, str) and value.isprintable() else ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
