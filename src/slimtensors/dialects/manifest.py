"""What a file says about itself: one readable line in the metadata of its header."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from slimtensors import _core
from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError

KEY = "slimtensors"
VERSION = 1
"""Of everything we write: manifests and blobs."""

_SEAL = ',"crc32c":'


@dataclass(frozen=True)
class Manifest:
    """How the tensors of one file are stored."""

    dialect: str
    checksums: Sequence[int | None]
    """CRC-32C of each stored tensor in the header's order; none where it carries its own."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for a tensor stored under another name."""
    plans: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that are stored in several parts, and their codecs."""

    def to_text(self, table: str) -> str:
        """Return the line; `table` is the list of tensors that will follow it in the header."""
        raw = table.encode()
        data: dict[str, Any] = {"version": VERSION, "dialect": self.dialect}
        if self.plans:
            data["plans"] = dict(self.plans)
        if self.tied:
            data["tied"] = dict(self.tied)
        data["checksums"] = list(self.checksums)
        data["table"] = [len(raw), _core.crc32c(raw)]
        body = json.dumps(data, separators=(",", ":"), ensure_ascii=False)[:-1]
        return f"{body}{_SEAL}{_core.crc32c(body.encode())}}}"

    @classmethod
    def from_text(cls, text: str, header: bytes) -> "Manifest":
        """Parse the line, and check that neither it nor the `header` around it has changed."""
        data = _parse(text)
        if type(data.get("version")) is not int:
            raise CorruptFileError("the manifest names no version")
        if data["version"] > VERSION:
            raise UnsupportedVersionError(
                f"written in format version {data['version']}, this library reads up to {VERSION};"
                " upgrade slimtensors"
            )
        _check_seal(text)
        try:
            size, checksum = data["table"]
            manifest = cls(
                str(data["dialect"]),
                [None if n is None else int(n) for n in data["checksums"]],
                _words(data.get("tied", {})),
                _words(data.get("plans", {})),
            )
            changed = _core.crc32c(header[-size:]) != checksum
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CorruptFileError(f"not a manifest: {error!r}") from error
        if changed:
            raise CorruptFileError(
                "the list of tensors is not the one that slimtensors wrote: the file is damaged, or"
                f" another program rewrote it and kept the metadata key {KEY!r}"
            )
        return manifest


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the manifest is not JSON: {error}") from error
    if not isinstance(data, dict):
        raise FormatError("the manifest is not a table")
    return data


def _words(table: dict[str, str]) -> dict[str, str]:
    if not all(isinstance(word, str) for word in table.values()):
        raise TypeError("a table of words holds something else")
    return table


def _check_seal(text: str) -> None:
    body, _, seal = text.rpartition(_SEAL)
    if seal != f"{_core.crc32c(body.encode())}}}":
        raise CorruptFileError("the manifest's checksum differs: the file is damaged")
