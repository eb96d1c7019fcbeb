"""Weight files: written whole, in parts by several processes, or joined from parts."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.write import ArchiveSource, TensorSource, Written, as_source, write_out
from slimtensors.codecs import Sliceable
from slimtensors.codecs.plan import Encoded, Plan, decode, encode
from slimtensors.codecs.presets import Choice, Chooser, StatsRule, TensorStats
from slimtensors.codecs.statistics import Sparsity, merge_rows, sparsity_of_rows
from slimtensors.errors import CorruptFileError
from slimtensors.folder.processes import LEAST, File, ProcessGroup, SingleProcess, Task
from slimtensors.parallel import Each
from slimtensors.storage import INDEX, Location, StoredFile, TensorBytes, weight_files
from slimtensors.tensor import Json, Spec, Zeros, as_bytes, concatenate


@dataclass(frozen=True)
class Pieces:
    """As what a tensor is stored."""

    names: Sequence[str]
    nbytes: Sequence[int]
    checksums: Sequence[int | None]
    plan: Json | None
    is_one_tensor: bool


@dataclass(frozen=True)
class Rows:
    """What was seen of some rows of a tensor."""

    zero: int
    negative: int
    is_24: bool

    @classmethod
    def of(cls, seen: TensorStats) -> "Rows":
        """Note what was seen."""
        zeros = seen.zeros
        return cls(zeros.zero, zeros.negative, 2 * zeros.zero >= zeros.items and seen.is_24())


def seen(spec: Spec, rows: Sequence[Rows]) -> TensorStats:
    """Return what would have been seen of a whole tensor."""
    zeros = Zeros(spec.numel, sum(r.zero for r in rows), sum(r.negative for r in rows))
    return TensorStats(spec, zeros, lambda: all(r.is_24 for r in rows))


@dataclass(frozen=True)
class Record:
    """The tensors of a finished file or part."""

    stored: Sequence[TensorSummary]
    pieces: Mapping[str, Pieces]
    files: Mapping[str, str]
    """The files by their names in the folder, and what must still be true of each."""
    sparsity: Mapping[str, Sparsity] = field(default_factory=dict)
    rows: Mapping[str, Rows] = field(default_factory=dict)
    """Of a part that holds some rows of a tensor, what was seen of them."""

    @classmethod
    def of(cls, written: Written, found: Mapping[str, Sparsity]) -> "Record":
        """Note what was written."""
        summary = written.summary()
        return cls(
            summary.tensors,
            {
                done.item.name: Pieces(
                    [piece.name for piece in done.pieces],
                    [piece.spec.nbytes for piece in done.pieces],
                    [piece.checksum for piece in done.pieces],
                    done.packed.plan.to_json() if done.packed.plan else None,
                    done.packed.is_one_tensor,
                )
                for done in written.done
            },
            dict.fromkeys(summary.files, ""),
            {t.name: found[t.name] for t in summary.tensors if t.name in found},
        )

    def relative_to(self, folder: Path) -> "Record":
        """Return this with files named as they are in their folder."""

        def name(file: str) -> str:
            return Path(file).relative_to(folder).as_posix()

        stored = [replace(tensor, file=name(tensor.file)) for tensor in self.stored]
        return replace(self, stored=stored, files={name(file): x for file, x in self.files.items()})

    def sealed(self, files: Mapping[str, str]) -> "Record":
        """Return this with what is true of its files."""
        return replace(self, files=files)

    def summary(self) -> Summary:
        """Return it in the words of `inspect`."""
        return Summary(self.stored, sorted(self.files))

    def plan(self, name: str) -> Plan | None:
        """Return the plan by which a tensor was stored."""
        plan = self.pieces[name].plan
        return Plan.from_json(plan) if plan is not None else None

    def to_text(self) -> str:
        """Return the JSON form."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes) -> "Record":
        """Parse the JSON form."""
        try:
            data: dict[str, Any] = json.loads(text)
            return cls(
                [TensorSummary(**{**t, "shape": tuple(t["shape"])}) for t in data["stored"]],
                {name: Pieces(**p) for name, p in data["pieces"].items()},
                data["files"],
                {name: _sparsity(s) for name, s in data["sparsity"].items()},
                {name: Rows(**r) for name, r in data["rows"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"not a record of finished files: {error!r}") from error


def _sparsity(data: Json) -> Sparsity:
    peaks = {int(group): most for group, most in data["peaks"].items()}
    return Sparsity(**{**data, "peaks": peaks})


_ITEMS = 3 << 20
"""Whole chunks of Huffman codes of values, of masks and of 2:4 values end at its multiples."""


def row_step(spec: Spec) -> int:
    """Return the number of rows at whose multiples a tensor may be cut."""
    row = math.prod(spec.shape[1:])
    return _ITEMS // math.gcd(_ITEMS, row) if row else 1


def some_rows(archive: Archive, item: TensorSource, begin: int, end: int) -> TensorSource:
    """Return some rows of a tensor as if they were all."""
    spec = Spec(item.spec.dtype, (end - begin, *item.spec.shape[1:]))
    return replace(item, spec=spec, read=lambda each: archive.load_rows(item.name, begin, end))


class Noting:
    """Chooses how to store rows as if they were all, and notes what was seen of them."""

    def __init__(self, rule: StatsRule) -> None:
        self._rule = rule
        self.rows: dict[str, Rows] = {}
        self.sparsity: dict[str, Sparsity] = {}

    def __call__(self, name: str, x: Tensor) -> Choice:
        """Choose."""
        seen = TensorStats.of(x)
        self.rows[name], self.sparsity[name] = Rows.of(seen), sparsity_of_rows(x)
        return self._rule(seen)


def whole(
    item: TensorSource,
    rule: StatsRule,
    rows: Sequence[Rows],
    parts: Sequence[Archive],
    notes: dict[str, str],
) -> TensorSource:
    """Return a tensor whose rows are in `parts`, to be written as if it had never been cut."""

    def read(each: Each) -> Tensor | Encoded | PackedTensor | None:
        choice = rule(seen(item.spec, rows))
        notes[item.name] = choice.note
        if choice.plan is None:
            return item.read(each)
        pieces = [part.encoded(item.name, each) or part.load_one(item.name, each) for part in parts]
        found = joined(choice.plan, pieces, each)
        size = sum(leaf.nbytes for _, leaf in found.leaves())
        return found if size < item.spec.nbytes else item.read(each)

    return replace(item, read=read)


def joined(plan: Plan, pieces: Sequence[Tensor | Encoded], each: Each) -> Encoded:
    """Return what encoding the whole would give.

    What a codec made of pieces is laid end to end. Where that would be something else, because
    pieces were stored otherwise or end within a chunk, they are decoded and encoded once more.
    """
    first = pieces[0]
    if not isinstance(first, Encoded) or not _are_chunks(plan, pieces):
        dense = [decode(piece, each) if isinstance(piece, Encoded) else piece for piece in pieces]
        return encode(plan, _stacked(dense), each)
    parts: dict[str, Tensor | Encoded] = {}
    for name in first.parts:
        inner = [piece.parts[name] for piece in pieces if isinstance(piece, Encoded)]
        if name in plan.then:
            parts[name] = joined(plan.then[name], inner, each)
        else:
            plain = [decode(part, each) if isinstance(part, Encoded) else part for part in inner]
            parts[name] = _stacked(plain)
    return Encoded(plan.codec, _stacked_spec([_spec(piece) for piece in pieces]), parts)


def _are_chunks(plan: Plan, pieces: Sequence[Tensor | Encoded]) -> bool:
    codec = plan.codec
    if not isinstance(codec, Sliceable):
        return False
    steps = [_spec(piece).numel % codec.step(_spec(piece)) for piece in pieces[:-1]]
    return not any(steps) and all(
        isinstance(piece, Encoded) and piece.codec == codec for piece in pieces
    )


def _spec(piece: Tensor | Encoded) -> Spec:
    return piece.spec if isinstance(piece, Encoded) else Spec.of(piece)


def _stacked_spec(specs: Sequence[Spec]) -> Spec:
    return Spec(specs[0].dtype, (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:]))


def _stacked(pieces: Sequence[Tensor]) -> Tensor:
    spec = _stacked_spec([Spec.of(piece) for piece in pieces])
    return concatenate([as_bytes(piece) for piece in pieces]).view(spec.dtype).view(spec.shape)


@dataclass(frozen=True)
class WeightOptions:
    """How weights are to be written."""

    choose: Chooser
    dialect: str
    max_shard_size: int | str | None = None
    """By default, files are as they were."""
    threads: int | None = None
    progress: Progress | None = None
    rule: Callable[[str], StatsRule | None] = lambda name: None
    """The rule by which a tensor, by its name, may be stored in pieces; none if it may not be."""
    found: dict[str, Sparsity] = field(default_factory=dict)
    """Where `choose` notes how sparse tensors are."""
    state: Callable[[Archive], ArchiveSource] = as_source
    """What is written of the tensors of a file."""
    ranks: ProcessGroup = field(default_factory=SingleProcess)
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
    where: Location
    how: WeightOptions

    @cached_property
    def states(self) -> dict[str, ArchiveSource]:
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
            state = ArchiveSource([items[name] for name in task.names])
            return self._put(state, folder / task.key, self.how.choose).relative_to(folder)
        (name,) = task.names
        rule = self.how.rule(name)
        assert rule is not None, name
        choose = Noting(rule)
        rows = ArchiveSource([some_rows(self.archive, items[name], *task.rows)])
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
            self.how.found[name] = merge_rows(part.record.sparsity[name] for part in rows)
        state = replace(state, items=[items[item.name] for item in state.items])
        record = self._write(state, key, folder, lambda nbytes: self.how.ranks.advance())
        noted = [replace(t, note=notes.get(t.name, t.note)) for t in record.stored]
        return replace(record, stored=noted)

    def _whole(
        self, item: TensorSource, parts: Sequence["Part"], notes: dict[str, str]
    ) -> TensorSource:
        rule = self.how.rule(item.name)
        assert rule is not None, item.name
        rows = [part.record.rows[item.name] for part in parts]
        return whole(item, rule, rows, [part.archive for part in parts], notes)

    def _may_be_cut(self, name: str) -> bool:
        return bool(self.how.rule(name)) and name in self.archive and self.archive.has_rows(name)

    def _write(
        self, state: ArchiveSource, key: str, folder: Path, progress: Progress | None = None
    ) -> Record:
        path = folder if self.how.max_shard_size is not None else folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        size = self.how.max_shard_size
        return self._put(state, path, self.how.choose, size, progress).relative_to(folder)

    def _put(
        self,
        state: ArchiveSource,
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
    where: Location

    @cached_property
    def archive(self) -> Archive:
        """What lies there."""
        return Archive.at(self.where)

    def item(self, item: TensorSource) -> TensorSource:
        """Return a tensor of this part, ready to be written."""
        return replace(item, read=lambda each: self._packed(item.name))

    def _packed(self, name: str) -> PackedTensor | None:
        (file,) = self.archive.files
        pieces = self.record.pieces[name]
        if not pieces.names:
            return None
        stored = next(stored for stored in self.record.stored if stored.name == name)
        return PackedTensor(
            [
                _piece(file, key, checksum)
                for key, checksum in zip(pieces.names, pieces.checksums, strict=True)
            ],
            self.record.plan(name),
            stored.error,
            stored.parts,
            pieces.is_one_tensor,
        )


def _piece(file: StoredFile, name: str, checksum: int | None) -> TensorBytes:
    entry = file.header.entries[name]
    raw = file.read(entry)
    data = torch.frombuffer(raw, dtype=torch.uint8) if len(raw) else b""
    return TensorBytes(name, entry.spec, [data], checksum)
