"""The weight files of a model folder: written whole, in parts, or joined from parts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch

from slimtensors.archive import Archive, Progress
from slimtensors.archive.decompress import make_exact_sources
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.originals import Originals, find_originals, store_originals
from slimtensors.archive.write import (
    ArchiveSource,
    TensorSource,
    WriteOptions,
    as_source,
    write,
)
from slimtensors.codecs.presets import Chooser, StatsRule
from slimtensors.codecs.statistics import Sparsity, merge_rows
from slimtensors.errors import ConfigError
from slimtensors.folder.build import Record
from slimtensors.folder.processes import (
    MIN_PART_BYTES,
    FileSizes,
    ProcessGroup,
    SingleProcess,
    Task,
)
from slimtensors.folder.rows import RowChooser, find_row_step, join_rows, select_rows
from slimtensors.storage import INDEX, Location, StoredFile, TensorBytes, weight_files


@dataclass(frozen=True, kw_only=True)
class FolderOptions(WriteOptions):
    """How a model folder is written.

    Without `max_shard_size`, files contain the same tensors as in the source. Functions that choose
    preset and dialect themselves raise if these are set.
    """

    replace: bool = False
    """Whether to replace an existing folder."""
    ranks: ProcessGroup | None = None
    """Processes that share the work. None: only this one."""

    @cached_property
    def group(self) -> ProcessGroup:
        """The processes that share the work."""
        return self.ranks or SingleProcess()

    def with_preset(self, preset: str | Chooser, dialect: str = "slim") -> Self:
        """Return a copy with preset and dialect; raise if they were set."""
        if self.preset is not None or self.dialect != "slim":
            raise ConfigError("options: preset and dialect cannot be set for this function")
        return replace(self, preset=preset, dialect=dialect)

    def report_progress(self, nbytes: int) -> None:
        """Report processed bytes, and send a heartbeat to the other processes."""
        if self.progress:
            self.progress(nbytes)
        self.group.heartbeat()


def _no_rule(name: str) -> StatsRule | None:
    return None


@dataclass(frozen=True)
class Weights:
    """The weights of a model folder and how to write them."""

    archive: Archive
    options: FolderOptions
    make_source: Callable[[Archive], ArchiveSource] = as_source
    """Returns the content to write for the tensors of a file."""
    rule: Callable[[str], StatsRule | None] = _no_rule
    """Returns the rule of a tensor that may be divided by rows, by name; else None."""
    sparsity: dict[str, Sparsity] = field(default_factory=dict)
    """Sparsity of each tensor; filled while they are written."""
    min_part_bytes: int = MIN_PART_BYTES
    keeps_originals: bool = False
    """Whether to store the headers of the source's plain files."""
    originals: Originals | None = None
    """Plain files to write again, byte for byte."""

    @cached_property
    def sources(self) -> dict[str, ArchiveSource]:
        """File name -> content. If a shard size is set, one entry named like the index."""
        if self.originals is not None:
            return make_exact_sources(self.make_source(self.archive), self.originals)
        main, *shards = weight_files(self.archive.location)
        is_split = self.options.max_shard_size is not None
        if is_split or not shards:
            source = self.make_source(self.archive)
            if not self.keeps_originals:
                source = replace(source, originals=None)
            return {INDEX if is_split else main: source}
        sources = {
            file: self.make_source(self.archive.select(names))
            for file, names in self.archive.shards().items()
        }
        return self._add_originals(sources) if self.keeps_originals else sources

    @property
    def index(self) -> tuple[str, bytes] | None:
        """Name and content of the index to write, if it is not a new one."""
        return self.originals.index if self.originals is not None else None

    def _add_originals(self, sources: dict[str, ArchiveSource]) -> dict[str, ArchiveSource]:
        originals = find_originals(self.archive)
        if store_originals(originals, self.archive.keys(), self.archive.path) is None:
            return sources
        assert originals is not None
        parts = originals.divide([*sources])
        return {
            file: replace(source, originals=parts[file].to_json() if parts[file].headers else None)
            for file, source in sources.items()
        }

    def file_sizes(self) -> list[FileSizes]:
        """Return the size of each file, and which tensors may be divided by rows."""
        return [
            FileSizes(
                key,
                {item.name: item.spec.nbytes for item in source.items},
                {
                    item.name: (item.spec.shape[0], find_row_step(item.spec))
                    for item in source.items
                    if self._is_divisible(item.name)
                },
            )
            for key, source in self.sources.items()
        ]

    def write_file(self, key: str, folder: Path) -> Record:
        """Write a file from the source."""
        return self._write(self.sources[key], key, folder, self.options)

    def write_part(self, task: Task, folder: Path) -> Record:
        """Write some tensors of a file, or some rows of one, to be joined later."""
        options = replace(self.options, max_shard_size=None, progress=self.options.report_progress)
        items = {item.name: item for item in self.sources[task.file].items}
        if task.rows is None:
            source = ArchiveSource([items[name] for name in task.names])
            result = write(source, folder / task.key, options)
            return Record.from_result(result, self.sparsity, folder)
        (name,) = task.names
        rule = self.rule(name)
        assert rule is not None, name
        choose = RowChooser(rule)
        source = ArchiveSource([select_rows(self.archive, items[name], *task.rows)])
        result = write(source, folder / task.key, replace(options, preset=choose))
        record = Record.from_result(result, self.sparsity, folder)
        return replace(record, sparsity=choose.sparsity, rows=choose.rows)

    def join(self, key: str, parts: Sequence["Part"], folder: Path) -> Record:
        """Write a file from its parts, with the same bytes as `write_file`."""
        source = self.sources[key]
        items = {item.name: item for item in source.items}
        notes: dict[str, str] = {}
        divided: dict[str, list[Part]] = {}
        for part in parts:
            if part.task.rows is not None:
                divided.setdefault(part.task.names[0], []).append(part)
                continue
            items |= {name: part.make_item(items[name]) for name in part.task.names}
            notes |= {stored.name: stored.note for stored in part.record.stored}
            self.sparsity.update(part.record.sparsity)
        for name, rows in divided.items():
            items[name] = self._join_rows(items[name], rows, notes)
            self.sparsity[name] = merge_rows(part.record.sparsity[name] for part in rows)
        source = replace(source, items=[items[item.name] for item in source.items])
        # The bytes were reported when the parts were written.
        options = replace(self.options, progress=None)
        record = self._write(source, key, folder, options)
        noted = [replace(t, note=notes.get(t.name, t.note)) for t in record.stored]
        return replace(record, stored=noted)

    def _join_rows(
        self, item: TensorSource, parts: Sequence["Part"], notes: dict[str, str]
    ) -> TensorSource:
        rule = self.rule(item.name)
        assert rule is not None, item.name
        rows = [part.record.rows[item.name] for part in parts]
        return join_rows(item, rule, rows, [part.archive for part in parts], notes)

    def _is_divisible(self, name: str) -> bool:
        if self.options.group.count == 1 or self.rule(name) is None:
            return False
        return name in self.archive and self.archive.has_rows(name)

    def _write(
        self, source: ArchiveSource, key: str, folder: Path, options: FolderOptions
    ) -> Record:
        path = folder if options.max_shard_size is not None else folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        progress: Progress = options.report_progress
        result = write(source, path, replace(options, progress=progress))
        return Record.from_result(result, self.sparsity, folder)


@dataclass(frozen=True)
class Part:
    """A finished part of a file."""

    task: Task
    record: Record
    location: Location

    @cached_property
    def archive(self) -> Archive:
        """The part, opened."""
        return Archive.from_location(self.location)

    def make_item(self, item: TensorSource) -> TensorSource:
        """Return a tensor of this part, to be written unchanged."""
        return replace(item, read=lambda each: self._read_packed(item.name))

    def _read_packed(self, name: str) -> PackedTensor | None:
        (file,) = self.archive.files
        pieces = self.record.pieces[name]
        if not pieces.names:
            return None
        stored = next(stored for stored in self.record.stored if stored.name == name)
        return PackedTensor(
            [
                _read_piece(file, key, checksum)
                for key, checksum in zip(pieces.names, pieces.checksums, strict=True)
            ],
            self.record.plan(name),
            stored.error,
            stored.parts,
            pieces.is_one_tensor,
        )


def _read_piece(file: StoredFile, name: str, checksum: int | None) -> TensorBytes:
    entry = file.header.entries[name]
    raw = file.read(entry)
    data = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else b""
    return TensorBytes(name, entry.spec, [data], checksum)
