"""Dialects: how plans are written into safetensors files, and found in them again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from slimtensors.archive.dialects import compressed_tensors, slim
from slimtensors.archive.dialects.manifest import KEY, VERSION, FileManifest, is_sealed
from slimtensors.archive.dialects.member import Member, PackedTensor, PlainMember, StoredEntry
from slimtensors.archive.dialects.slim import BlobMember
from slimtensors.codecs.plan import Encoded, Plan
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, nearest
from slimtensors.parallel import Each
from slimtensors.storage import StoredFile
from slimtensors.tensor import Json, Spec


@dataclass(frozen=True)
class Dialect:
    """How tensors are written."""

    name: str
    check: Callable[[str, Spec], None]
    """Raises, with the tensor's name, when it could never be stored."""
    packed: Callable[[str, Tensor, Plan | None, Each], PackedTensor]
    """Turns a tensor in main memory into what goes into a file."""
    encoded: Callable[[str, Encoded, Each], PackedTensor]
    """Turns a tensor in encoded form into what goes into a file."""
    parts: int
    """The most pieces that one tensor becomes."""


_DIALECTS: Mapping[str, Dialect] = {
    slim.NAME: Dialect(slim.NAME, slim.check, slim.pack_tensor, slim.encoded, parts=1),
    compressed_tensors.NAME: Dialect(
        compressed_tensors.NAME,
        compressed_tensors.check,
        compressed_tensors.pack,
        compressed_tensors.pack_encoded,
        parts=4,
    ),
}


def names() -> list[str]:
    """List the dialects."""
    return list(_DIALECTS)


def find(name: str) -> Dialect:
    """Return the dialect called `name`."""
    if name not in _DIALECTS:
        raise ConfigError(f"unknown dialect {name!r}; {nearest(name, _DIALECTS)}")
    return _DIALECTS[name]


@dataclass(frozen=True)
class Contents:
    """What a set of files holds."""

    members: dict[str, Member]
    """The tensors by name; tied names stand for the same member."""
    tree: Json | None
    """The outline of a state that is not all tensors."""
    delta: Mapping[str, Any] | None
    """How the tensors differ from those of a base."""
    owners: Mapping[str, str]
    """Which tensor each entry of the files belongs to."""


def read_contents(files: Sequence[StoredFile]) -> Contents:
    """Return what these files hold, whatever dialect wrote them."""
    stored: dict[str, StoredEntry] = {}
    blobs: dict[str, bool | None] = {}
    groups: list[compressed_tensors.PartGroup] = []
    unclaimed: dict[str, StoredEntry] = {}
    tied: list[tuple[str, str, StoredFile]] = []
    tree: Json | None = None
    delta: Mapping[str, Any] | None = None
    for file in files:
        entries = file.header.entries
        for name in stored.keys() & entries.keys():
            raise FormatError(f"{file.name}: {name}: is in another shard too")
        manifest = _manifest(file)
        if manifest is None:
            here = {name: StoredEntry(file, entry, None) for name, entry in entries.items()}
            unclaimed |= here
            blobs |= dict.fromkeys(entries)
        else:
            pairs = zip(entries.items(), manifest.checksums, strict=True)
            here = {name: StoredEntry(file, entry, found) for (name, entry), found in pairs}
            blobs |= {name: found.checksum is None for name, found in here.items()}
            groups += compressed_tensors.find_own_groups(here, manifest.plans, file.name)
            tied += [(name, home, file) for name, home in manifest.tied.items()]
            tree = manifest.tree if tree is None else tree
            delta = manifest.delta if delta is None else delta
        stored |= here
    groups += compressed_tensors.find_foreign_groups(unclaimed)
    result = _named(stored, blobs, groups)
    for name, home, file in tied:
        if home not in result or name in result:
            raise FormatError(f"{file.name}: {name}: cannot be tied to {home!r}")
    owners = {key: key for key in stored} | {
        key: group.name for group in groups for key in group.keys
    }
    return Contents(result | {name: result[home] for name, home, _ in tied}, tree, delta, owners)


def _named(
    stored: Mapping[str, StoredEntry],
    blobs: Mapping[str, bool | None],
    groups: Sequence[compressed_tensors.PartGroup],
) -> dict[str, Member]:
    """Return whole tensors by name, in the order of what is stored."""
    owner = {key: group for group in groups for key in group.keys}
    result: dict[str, Member] = {}
    for key, found in stored.items():
        group = owner.get(key)
        name = group.name if group else key
        member = group.member if group else slim.as_member(found, blob=blobs[key])
        if name in result and result[name] is not member:
            raise FormatError(f"{found.file.name}: {name}: is stored twice, plain or in parts")
        result[name] = member
    return result


def _manifest(file: StoredFile) -> FileManifest | None:
    text = file.header.metadata.get(KEY)
    if text is None:
        if any(map(is_sealed, file.header.metadata.values())):
            raise CorruptFileError(f"{file.name}: the manifest's name in the metadata is damaged")
        return None
    try:
        manifest = FileManifest.from_text(text, file.text)
    except FormatError as error:
        raise type(error)(f"{file.name}: {error}") from error
    if manifest.dialect not in _DIALECTS:
        raise FormatError(f"{file.name}: unknown dialect {manifest.dialect!r}")
    if len(manifest.checksums) != len(file.header.entries):
        raise CorruptFileError(f"{file.name}: the manifest does not fit the list of tensors")
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
    "find",
    "names",
    "read_contents",
]
