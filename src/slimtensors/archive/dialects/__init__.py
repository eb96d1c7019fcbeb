"""Dialects: how plans are represented in safetensors files."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import starmap
from typing import Any

from torch import Tensor

from slimtensors.archive.dialects import compressed_tensors, slim
from slimtensors.archive.dialects.entries import (
    KEY,
    MAX_COPIES,
    VERSION,
    FileManifest,
    Member,
    PackedTensor,
    PlainMember,
    StoredEntry,
    is_damaged_manifest,
)
from slimtensors.archive.dialects.slim import BlobMember
from slimtensors.codecs.plan import Encoded, Plan
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, suggest
from slimtensors.parallel import Each
from slimtensors.storage import StoredFile
from slimtensors.tensor import Json, Spec


@dataclass(frozen=True)
class Dialect:
    """How tensors become entries of a safetensors file."""

    name: str
    check: Callable[[str, Spec], None]
    """Raises, with the tensor's name, if the dialect cannot store it."""
    pack: Callable[[str, Tensor, Plan | None, Each], PackedTensor]
    """Returns the entries of a tensor in main memory."""
    pack_encoded: Callable[[str, Encoded, Each], PackedTensor]
    """Returns the entries of a tensor in encoded form."""
    max_parts: int
    """Maximum number of entries of one tensor."""


_DIALECTS: Mapping[str, Dialect] = {
    slim.NAME: Dialect(slim.NAME, slim.check, slim.pack, slim.pack_encoded, max_parts=1),
    compressed_tensors.NAME: Dialect(
        compressed_tensors.NAME,
        compressed_tensors.check,
        compressed_tensors.pack,
        compressed_tensors.pack_encoded,
        max_parts=4,
    ),
}


def names() -> list[str]:
    """Return the names of all dialects."""
    return list(_DIALECTS)


def find(name: str) -> Dialect:
    """Return the dialect called `name`."""
    if name not in _DIALECTS:
        raise ConfigError(f"unknown dialect {name!r}; {suggest(name, _DIALECTS)}")
    return _DIALECTS[name]


@dataclass(frozen=True)
class Contents:
    """The content of a set of files."""

    members: dict[str, Member]
    """Tensors by name; tied names share one member."""
    tree: Json | None
    """Outline of the values that are not tensors."""
    delta: Mapping[str, Any] | None
    """How tensors differ from a base."""
    owners: Mapping[str, str]
    """Entry -> tensor it belongs to."""
    copies: Mapping[str, str]
    """Name -> name of the tensor with the same bits; both are in `members`."""
    sources: Mapping[str, Mapping[str, Any]]
    """File -> the key `source` of its manifest (`slimtensors.archive.originals`)."""


def read_contents(files: Sequence[StoredFile]) -> Contents:
    """Return the content of these files, written in any dialect or by other libraries."""
    stored: dict[str, StoredEntry] = {}
    blobs: dict[str, bool | None] = {}
    groups: list[compressed_tensors.PartGroup] = []
    unclaimed: dict[str, StoredEntry] = {}
    tied: list[tuple[str, str, StoredFile]] = []
    copies: list[tuple[str, str, StoredFile]] = []
    tree: Json | None = None
    delta: Mapping[str, Any] | None = None
    sources: dict[str, Mapping[str, Any]] = {}
    for file in files:
        entries = file.header.entries
        for name in stored.keys() & entries.keys():
            raise FormatError(f"{file.name}: {name}: duplicate tensor, also in another shard")
        manifest = read_manifest(file)
        if manifest is None:
            found = {name: StoredEntry(file, entry, None) for name, entry in entries.items()}
            unclaimed |= found
            blobs |= dict.fromkeys(entries)
        else:
            pairs = zip(entries.items(), manifest.checksums, strict=True)
            found = {name: StoredEntry(file, entry, crc) for (name, entry), crc in pairs}
            blobs |= {name: entry.checksum is None for name, entry in found.items()}
            if manifest.plans:
                groups += compressed_tensors.find_own_groups(found, manifest.plans, file.name)
            tied += [(name, home, file) for name, home in manifest.tied.items()]
            copies += [(name, home, file) for name, home in manifest.copies.items()]
            tree = manifest.tree if tree is None else tree
            delta = manifest.delta if delta is None else delta
            if manifest.source is not None:
                sources[file.name] = manifest.source
        stored |= found
    if unclaimed:
        groups += compressed_tensors.find_foreign_groups(unclaimed)
    result = _make_members(stored, blobs, groups)
    for name, home, file in tied:
        if home not in result or name in result:
            raise FormatError(f"{file.name}: {name}: invalid tied name, refers to {home!r}")
    owners = {key: key for key in stored} | {
        key: group.name for group in groups for key in group.keys
    }
    homes = dict(result)
    result |= {name: result[home] for name, home, _ in tied}
    for name, home, file in copies:
        if home not in homes or name in result:
            raise FormatError(f"{file.name}: {name}: invalid copy, refers to {home!r}")
        result[name] = copy(homes[home])  # an object of its own: not tied
    equal = {name: home for name, home, _ in copies}
    check_copies(equal, files[0].name if files else "")
    return Contents(result, tree, delta, owners, equal, sources)


def check_copies(copies: Mapping[str, str], path: str) -> None:
    """Raise if a tensor has too many copies: each takes memory, but no space in the file."""
    for home, count in Counter(copies.values()).items():
        if count > MAX_COPIES:
            raise FormatError(f"{path}: {home}: {count} copies, expected at most {MAX_COPIES}")


def read_generation(file: StoredFile) -> str | None:
    """Return the text that all shards of one save share, or None if the file has none."""
    manifest = read_manifest(file)
    return manifest.generation if manifest else None


def _make_members(
    stored: Mapping[str, StoredEntry],
    blobs: Mapping[str, bool | None],
    groups: Sequence[compressed_tensors.PartGroup],
) -> dict[str, Member]:
    """Return the tensors by name, in the order of the entries."""
    owner = {key: group for group in groups for key in group.keys}
    result: dict[str, Member] = {}
    for key, found in stored.items():
        group = owner.get(key)
        name = group.name if group else key
        member = group.member if group else slim.make_member(found, blob=blobs[key])
        if name in result and result[name] is not member:
            raise FormatError(f"{found.file.name}: {name}: stored twice, plain and in parts")
        result[name] = member
    return result


def read_manifest(file: StoredFile) -> FileManifest | None:
    """Return the manifest of a file, or None if it has none."""
    text = file.header.metadata.get(KEY)
    if text is None:
        if any(starmap(is_damaged_manifest, file.header.metadata.items())):
            raise CorruptFileError(f"{file.name}: the metadata key of the manifest is damaged")
        return None
    try:
        manifest = FileManifest.from_text(text, file.text)
    except FormatError as error:
        raise type(error)(f"{file.name}: {error}") from error
    if manifest.dialect not in _DIALECTS:
        raise FormatError(f"{file.name}: unknown dialect {manifest.dialect!r}")
    if len(manifest.checksums) != len(file.header.entries):
        raise CorruptFileError(f"{file.name}: the manifest does not match the list of tensors")
    return manifest


__all__ = [
    "KEY",
    "VERSION",
    "BlobMember",
    "Contents",
    "Dialect",
    "FileManifest",
    "Member",
    "PackedTensor",
    "PlainMember",
    "check_copies",
    "find",
    "names",
    "read_contents",
    "read_generation",
    "read_manifest",
]
