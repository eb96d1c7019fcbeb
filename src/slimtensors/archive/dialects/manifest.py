"""What a file says about itself: one readable line in the metadata of its header."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from slimtensors import _core
from slimtensors.errors import CorruptFileError, UnsupportedVersionError
from slimtensors.tensor import Json, is_valid_text

KEY = "slimtensors"
VERSION = 1
"""Of everything we write: manifests and blobs."""

_SEAL = ',"crc32c":'


@dataclass(frozen=True)
class FileManifest:
    """How the tensors of one file are stored."""

    dialect: str
    checksums: Sequence[int | None]
    """CRC-32C of each stored tensor in the header's order; none where it carries its own."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for a tensor stored under another name."""
    plans: Mapping[str, str] = field(default_factory=dict)
    """Names of tensors that are stored in several parts, and their codecs."""

    tree: Json | None = None
    """What else the state holds, as `slimtensors.tree` outlines it."""
    delta: Mapping[str, Any] | None = None
    """How the tensors differ from those of a base, as `slimtensors.delta` writes it."""

    def to_text(self, table: str) -> str:
        """Return the line; `table` is the list of tensors that will follow it in the header."""
        raw = table.encode()
        data: dict[str, Any] = {"version": VERSION, "dialect": self.dialect}
        if self.plans:
            data["plans"] = dict(self.plans)
        if self.tied:
            data["tied"] = dict(self.tied)
        if self.tree is not None:
            data["tree"] = self.tree
        if self.delta is not None:
            data["delta"] = dict(self.delta)
        data["checksums"] = list(self.checksums)
        data["table"] = [len(raw), _core.crc32c(raw)]
        body = json.dumps(data, separators=(",", ":"), ensure_ascii=False)[:-1]
        return f"{body}{_SEAL}{_core.crc32c(body.encode())}}}"

    @classmethod
    def from_text(cls, text: str, header: bytes) -> "FileManifest":
        """Parse the line, and check that neither it nor the `header` around it has changed."""
        data = _parse(text)
        checksums, tied, plans = data["checksums"], data.get("tied", {}), data.get("plans", {})
        tree, delta = data.get("tree"), data.get("delta")
        fine = isinstance(checksums, list) and all(map(_is_checksum, checksums))
        if not fine or not _is_table_of_text(tied) or not _is_table_of_text(plans):
            raise CorruptFileError("not a manifest: its checksums, ties or plans are none")
        if not (tree is None or isinstance(tree, dict)) or not (
            delta is None or isinstance(delta, dict)
        ):
            raise CorruptFileError("not a manifest: its tree or delta is none")
        match data["table"]:
            case [int(size), int(found)] if _core.crc32c(header[-size:]) == found:
                return cls(str(data["dialect"]), checksums, tied, plans, tree, delta)
        raise CorruptFileError(
            "the list of tensors is not the one that slimtensors wrote: the file is damaged, or"
            f" another program rewrote it and kept the metadata key {KEY!r}"
        )


def is_sealed(text: str) -> bool:
    """Tell whether `text` ends with its own checksum, as a manifest does."""
    body, _, seal = text.rpartition(_SEAL)
    return bool(body) and seal == f"{_core.crc32c(body.encode(errors='surrogatepass'))}}}"


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text)
        sealed = is_sealed(text)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the manifest is not JSON: {error}") from error
    version = data.get("version") if isinstance(data, dict) else None
    if type(version) is not int or version < 1:
        raise CorruptFileError("the manifest names no version")
    if version > VERSION:
        raise UnsupportedVersionError(
            f"written in format version {version}, this library reads up to {VERSION};"
            " upgrade slimtensors"
        )
    if not sealed or not {"dialect", "checksums", "table"} <= data.keys():
        raise CorruptFileError("the manifest's checksum differs: the file is damaged")
    return cast(dict[str, Any], data)


def _is_checksum(number: object) -> bool:
    return number is None or (type(number) is int and 0 <= number < 1 << 32)


def _is_table_of_text(table: object) -> bool:
    if not isinstance(table, dict) or not all(isinstance(word, str) for word in table.values()):
        return False
    return is_valid_text("".join((*table, *table.values())))
