"""Files of weights: written whole, in parts by several processes, or joined from parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch

from slimtensors.archive import Archive, Progress
from slimtensors.archive.state import Item, State, as_state
from slimtensors.archive.write import write_out
from slimtensors.container import INDEX, Piece, Place, StoredFile, weight_files
from slimtensors.dialects import Packed
from slimtensors.making.division import LEAST, File, Task
from slimtensors.making.record import Record
from slimtensors.making.slices import Noting, row_step, some_rows, whole
from slimtensors.presets import Chooser, Rule
from slimtensors.ranks import Alone, Ranks
from slimtensors.sparsity import Sparsity, stacked


@dataclass(frozen=True)
class How:
    """How weights are to be written."""

    choose: Chooser
    dialect: str
    max_shard_size: int | str | None = None
    """By default, files are as they were."""
    threads: int | None = None
    progress: Progress | None = None
    rule: Callable[[str], Rule | None] = lambda name: None
    """The rule by which a tensor, by its name, may be stored in pieces; none if it may not be."""
    found: dict[str, Sparsity] = field(default_factory=dict)
    """Where `choose` notes how sparse tensors are."""
    state: Callable[[Archive], State] = as_state
    """What is written of the tensors of a file."""
    ranks: Ranks = field(default_factory=Alone)
    least: int = LEAST
    """Bytes of the smallest part of a file."""

    def advance(self, nbytes: int) -> None:
        """Say that so many bytes are done."""
        if self.progress:
            self.progress(nbytes)
        self.ranks.advance()


@dataclass(frozen=True)
class Weights:
    """The weights of a model, and what is to become of them."""

    archive: Archive
    where: Place
    how: How

    @cached_property
    def states(self) -> dict[str, State]:
        """The files to be made and what goes there; one that stands for all, if they are new."""
        if self.how.max_shard_size is not None:
            return {INDEX: self.how.state(self.archive)}
        main, *has_index = weight_files(self.where)
        if not has_index:
            return {main: self.how.state(self.archive)}
        shards = self.archive.shards().items()
        return {key: self.how.state(self.archive.select(names)) for key, names in shards}

    def files(self) -> list[File]:
        """Return how large the files are, and which tensors may be cut."""
        return [
            File(
                key,
                {item.name: item.spec.nbytes for item in state.items},
                {
                    item.name: (item.spec.shape[0], row_step(item.spec))
                    for item in state.items
                    if self._may_be_cut(item.name)
                },
            )
            for key, state in self.states.items()
        ]

    def write_file(self, key: str, folder: Path) -> Record:
        """Write a file from the source."""
        return self._write(self.states[key], key, folder)

    def write_part(self, task: Task, folder: Path) -> Record:
        """Write some tensors of a file, or some rows of one, to be joined later."""
        items = {item.name: item for item in self.states[task.file].items}
        if task.rows is None:
            state = State([items[name] for name in task.names])
            return self._put(state, folder / task.key, self.how.choose).relative_to(folder)
        (name,) = task.names
        rule = self.how.rule(name)
        assert rule is not None, name
        choose = Noting(rule)
        rows = State([some_rows(self.archive, items[name], *task.rows)])
        record = self._put(rows, folder / task.key, choose).relative_to(folder)
        return replace(record, sparsity=choose.sparsity, rows=choose.rows)

    def join(self, key: str, parts: Sequence["Part"], folder: Path) -> Record:
        """Write a file from its parts, byte for byte as `write_file` would."""
        state = self.states[key]
        items = {item.name: item for item in state.items}
        notes: dict[str, str] = {}
        cut: dict[str, list[Part]] = {}
        for part in parts:
            if part.task.rows is not None:
                cut.setdefault(part.task.names[0], []).append(part)
                continue
            items |= {name: part.item(items[name]) for name in part.task.names}
            notes |= {stored.name: stored.note for stored in part.record.stored}
            self.how.found.update(part.record.sparsity)
        for name, rows in cut.items():
            items[name] = self._whole(items[name], rows, notes)
            self.how.found[name] = stacked(part.record.sparsity[name] for part in rows)
        state = replace(state, items=[items[item.name] for item in state.items])
        record = self._write(state, key, folder, lambda nbytes: self.how.ranks.advance())
        noted = [replace(t, note=notes.get(t.name, t.note)) for t in record.stored]
        return replace(record, stored=noted)

    def _whole(self, item: Item, parts: Sequence["Part"], notes: dict[str, str]) -> Item:
        rule = self.how.rule(item.name)
        assert rule is not None, item.name
        rows = [part.record.rows[item.name] for part in parts]
        return whole(item, rule, rows, [part.archive for part in parts], notes)

    def _may_be_cut(self, name: str) -> bool:
        return bool(self.how.rule(name)) and name in self.archive and self.archive.has_rows(name)

    def _write(
        self, state: State, key: str, folder: Path, progress: Progress | None = None
    ) -> Record:
        path = folder if self.how.max_shard_size is not None else folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self.how.max_shard_size
        return self._put(state, path, self.how.choose, size, progress).relative_to(folder)

    def _put(
        self,
        state: State,
        path: Path,
        choose: Chooser,
        max_shard_size: int | str | None = None,
        progress: Progress | None = None,
    ) -> Record:
        written = write_out(
            state,
            path,
            preset=choose,
            dialect=self.how.dialect,
            max_shard_size=max_shard_size,
            threads=self.how.threads,
            progress=progress or self.how.advance,
        )
        return Record.of(written, self.how.found)


@dataclass(frozen=True)
class Part:
    """A finished part of a file."""

    task: Task
    record: Record
    where: Place

    @cached_property
    def archive(self) -> Archive:
        """What lies there."""
        return Archive.at(self.where)

    def item(self, item: Item) -> Item:
        """Return a tensor of this part, ready to be written."""
        return replace(item, read=lambda each: self._packed(item.name))

    def _packed(self, name: str) -> Packed | None:
        (file,) = self.archive.files
        pieces = self.record.pieces[name]
        if not pieces.names:
            return None
        stored = next(stored for stored in self.record.stored if stored.name == name)
        return Packed(
            [
                _piece(file, key, checksum)
                for key, checksum in zip(pieces.names, pieces.checksums, strict=True)
            ],
            self.record.plan(name),
            stored.error,
            stored.parts,
            pieces.is_one_tensor,
        )


def _piece(file: StoredFile, name: str, checksum: int | None) -> Piece:
    entry = file.header.entries[name]
    raw = file.read(entry)
    data = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else b""
    return Piece(name, entry.spec, [data], checksum)
