"""Read checkpoints, and what they are differences from."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.workers import Workers
from slimtensors.checkpoint.entries import (
    NEEDS_BASE,
    NEEDS_SIBLING,
    SAME,
    WHOLE,
    Entry,
    decoded,
)
from slimtensors.checkpoint.manifest import STATE, is_checkpoint, read_manifest
from slimtensors.delta import digest
from slimtensors.errors import CorruptFileError, FormatError, MismatchError
from slimtensors.spec import Each, Json, Spec
from slimtensors.tree import unflatten


class StoredState:
    """A checkpoint on disk: names at once, tensors when asked for."""

    def __init__(self, folder: Path, *, base: Path | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._archive = Archive(folder / STATE)
        self._entries, self.tied = stored_entries(self._archive)
        self._base_folder = base
        self._base: StoredState | None = None
        if self.manifest.base is not None:
            self._base = self._opened_base()

    @property
    def tree(self) -> Json | None:
        """What the state holds besides tensors."""
        return self._archive.tree

    def names(self) -> Iterator[str]:
        """Yield the names of all tensors, without tied ones."""
        yield from (self._entries or (n for n in self._archive if n not in self.tied))

    def __contains__(self, name: object) -> bool:
        return name in (self._entries or self._archive)

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        return self._entries[name].like if self._entries else self._archive.spec(name)

    def kind(self, name: str) -> str:
        """Return in which way a tensor is stored, as its entry calls it."""
        return self._entries[name].kind if self._entries else WHOLE

    def load(self, name: str, each: Each, siblings: dict[str, Tensor] | None = None) -> Tensor:
        """Read and decode a tensor; `siblings` are others of this checkpoint that were read."""
        if not self._entries:
            return self._archive.load_one(name, each)
        entry = self._entries[name]
        other = None
        if entry.kind in NEEDS_SIBLING:
            assert entry.by is not None
            known = siblings or {}
            other = known[entry.by] if entry.by in known else self.load(entry.by, each)
        elif entry.kind in NEEDS_BASE:
            other = self._from_base(name, entry, each)
        r = None if entry.kind == SAME else self._archive.load_one(name, each)
        try:
            return decoded(entry, r, other, each)
        except CorruptFileError as error:
            raise CorruptFileError(f"{self._archive.path}: {name}: {error}") from error

    def load_all(self, *, threads: int | None = None) -> dict[str, Tensor]:
        """Read everything, what others are decoded by first."""
        names = list(self.names())
        later = {name for name, e in self._entries.items() if e.kind in NEEDS_SIBLING}
        found: dict[str, Tensor] = {}
        with Workers(threads) as workers:

            def one(name: str) -> Tensor:
                return self.load(name, workers.each, found)

            for some in ([n for n in names if n not in later], [n for n in names if n in later]):
                results = workers.in_order(one, some, lambda name: self.spec(name).nbytes)
                found.update(zip(some, results, strict=True))
        tensors = {name: found[name] for name in names}
        return tensors | {name: tensors[home] for name, home in self.tied.items()}

    def load_state(self, *, threads: int | None = None) -> dict[str, Any]:
        """Read everything and put it together as it was."""
        tensors = self.load_all(threads=threads)
        if self.tree is None:
            return dict(tensors)
        try:
            state = unflatten(self.tree, tensors)
        except FormatError as error:
            raise type(error)(f"{self._archive.path}: {error}") from error
        if not isinstance(state, dict):
            raise CorruptFileError(f"{self._archive.path}: holds no table")
        return state

    def _opened_base(self) -> "StoredState":
        base = self.manifest.base
        assert base is not None
        home = self._base_folder or self.folder.parent / base.name
        if home.resolve() == self.folder.resolve():
            raise CorruptFileError(f"{self.folder}: says that it is a difference from itself")
        needs = f"{self.folder}: is a difference from {base.name} (id {base.id})"
        if not is_checkpoint(home):
            raise MismatchError(f"{needs}, which is not at {home}; bring it back, or pass base=...")
        if (have := read_manifest(home).id) != base.id:
            raise MismatchError(f"{needs}; the checkpoint at {home} has the id {have}")
        return StoredState(home)

    def _from_base(self, name: str, entry: Entry, each: Each) -> Tensor:
        if self._base is None or name not in self._base:
            raise CorruptFileError(f"{self._archive.path}: {name}: its base has no such tensor")
        y = self._base.load(name, each)
        if digest(y) != entry.base:
            raise MismatchError(
                f"{self._base.folder}: {name}: is not the tensor that {self.folder} was made from"
            )
        return y


def stored_entries(archive: Archive) -> tuple[dict[str, Entry], dict[str, str]]:
    """Return how each tensor is stored, nothing if all are there as they are; and tied names."""
    if archive.delta is None:
        return {}, archive.tied()
    match archive.delta:
        case {"checkpoint": dict(entries), "tied": dict(tied)} if (
            all(isinstance(entry, dict) for entry in entries.values())
            and tied.keys().isdisjoint(entries)
            and all(isinstance(home, str) and home in entries for home in tied.values())
        ):
            parsed = {name: Entry.from_json(entry) for name, entry in entries.items()}
        case _:
            raise CorruptFileError(f"{archive.path}: does not say how its tensors are stored")
    for name, entry in parsed.items():
        if entry.kind != SAME and name not in archive:
            raise CorruptFileError(f"{archive.path}: {name}: is missing")
        if entry.by is not None and _leads_on(parsed.get(entry.by)):
            raise CorruptFileError(f"{archive.path}: {name}: cannot be decoded by {entry.by}")
    return parsed, tied


def _leads_on(entry: Entry | None) -> bool:
    return entry is None or entry.kind in NEEDS_SIBLING
