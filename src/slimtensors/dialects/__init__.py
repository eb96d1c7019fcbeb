"""Dialects: how plans are written into safetensors files, and found in them again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from slimtensors.container import Piece, StoredFile
from slimtensors.dialects import compressed_tensors, slim
from slimtensors.dialects.manifest import KEY, Manifest
from slimtensors.dialects.member import Member, Stored
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, nearest
from slimtensors.plan import Plan
from slimtensors.spec import Each, Spec

Packed = tuple[list[Piece], Plan | None]


@dataclass(frozen=True)
class Dialect:
    """How tensors are written."""

    name: str
    check: Callable[[str, Spec], None]
    """Raises, with the tensor's name, when it could never be stored."""
    pieces: Callable[[str, Tensor, Plan | None, Each], Packed]
    """Turns a tensor in main memory into what goes into a file, and says by which plan."""
    parts: int
    """The most pieces that one tensor becomes."""


_DIALECTS: Mapping[str, Dialect] = {
    slim.NAME: Dialect(slim.NAME, slim.check, slim.pieces, parts=1),
    compressed_tensors.NAME: Dialect(
        compressed_tensors.NAME, compressed_tensors.check, compressed_tensors.pieces, parts=4
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


def members(files: Sequence[StoredFile]) -> dict[str, Member]:
    """Return the tensors of these files by name, whatever dialect wrote them.

    Tied names stand for the same member.
    """
    stored: dict[str, Stored] = {}
    blobs: dict[str, bool | None] = {}
    plans: dict[str, str] = {}
    tied: dict[str, str] = {}
    for file in files:
        entries = file.header.entries
        for name in stored.keys() & entries.keys():
            raise FormatError(f"{file.name}: {name}: is in another shard too")
        manifest = _manifest(file)
        if manifest is None:
            stored |= {name: Stored(file, entry, None) for name, entry in entries.items()}
            blobs |= dict.fromkeys(entries)
            continue
        for (name, entry), found in zip(entries.items(), manifest.checksums, strict=True):
            stored[name] = Stored(file, entry, found)
            blobs[name] = found is None
        plans |= manifest.plans
        tied |= manifest.tied
    groups = [
        *compressed_tensors.ours(stored, plans),
        *compressed_tensors.foreign({k: v for k, v in stored.items() if blobs[k] is None}),
    ]
    return _named(stored, blobs, groups, tied)


def _named(
    stored: Mapping[str, Stored],
    blobs: Mapping[str, bool | None],
    groups: Sequence[compressed_tensors.Group],
    tied: Mapping[str, str],
) -> dict[str, Member]:
    owner = {key: group for group in groups for key in group.keys}
    result: dict[str, Member] = {}
    for key, found in stored.items():
        if key not in owner:
            result[key] = slim.member(found, blob=blobs[key])
        elif owner[key].name not in result:
            result[owner[key].name] = owner[key].member
    if len(result) != len(stored) - len(owner) + len(groups):
        twice = next(group.name for group in groups if group.name in stored)
        raise FormatError(f"{twice}: is stored plain and in parts")
    for name, target in tied.items():
        if target not in result or name in result:
            raise FormatError(f"{name}: is said to be tied to {target!r}, which cannot be")
        result[name] = result[target]
    return result


def _manifest(file: StoredFile) -> Manifest | None:
    text = file.header.metadata.get(KEY)
    if text is None:
        return None
    try:
        manifest = Manifest.from_text(text, file.text)
    except FormatError as error:
        raise type(error)(f"{file.name}: {error}") from error
    if manifest.dialect not in _DIALECTS:
        raise FormatError(f"{file.name}: unknown dialect {manifest.dialect!r}")
    if len(manifest.checksums) != len(file.header.entries):
        raise CorruptFileError(f"{file.name}: the manifest does not fit the list of tensors")
    return manifest


__all__ = ["KEY", "Dialect", "Manifest", "Member", "find", "members", "names"]
