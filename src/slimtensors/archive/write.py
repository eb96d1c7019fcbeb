"""Write archives: collect what to store, choose plans, encode, and write."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from slimtensors.archive import dialects
from slimtensors.archive.dialects import KEY, Dialect, FileManifest, PackedTensor
from slimtensors.archive.read import Archive, Progress
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.tree import flatten
from slimtensors.codecs import Dense, TorchQuantized, presets
from slimtensors.codecs.plan import Encoded, Plan
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.errors import ConfigError, UnsupportedTensorError
from slimtensors.parallel import Each, Workers
from slimtensors.storage import (
    FileOutput,
    FolderOutput,
    LocalLocation,
    Location,
    Output,
    RemoteLocation,
    RemoteOutput,
    StrPath,
    TensorBytes,
    check_name,
    locate,
    parse_size,
)
from slimtensors.tensor import Json, Spec, ceil_div, check_storable, dtype_name, to_cpu


@dataclass(frozen=True)
class TensorSource:
    """A tensor to be written, read or computed only when its turn comes."""

    name: str
    spec: Spec
    read: Callable[[Each], Tensor | Encoded | PackedTensor | None]
    """Returns it in main memory; none if it turns out that there is nothing to store.

    What is encoded already, or even ready to be written, is stored in that form.
    """
    runs_from_file: bool = False
    """Whether its parts may be used where they lie in the file, as if in memory."""
    always_blob: bool = False
    """Whether other readers must never take it for the tensor of its name."""


@dataclass(frozen=True)
class ArchiveSource:
    """Everything that goes into an archive."""

    items: Sequence[TensorSource]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Names that stand for one of the items."""
    tree: Json | None = None
    """What is not a tensor, as `slimtensors.tree` outlines it."""
    delta: Mapping[str, Any] | None = None
    """How the tensors differ from those of a base; complete once all items have been read."""

    def __post_init__(self) -> None:
        for name in (*(item.name for item in self.items), *self.tied):
            check_name(name)


def as_source(tensors: Mapping[str, Any] | Archive) -> ArchiveSource:
    """Check that all of it can be stored, and return it."""
    return _archived(tensors) if isinstance(tensors, Archive) else given(*flatten(tensors))


def _archived(archive: Archive) -> ArchiveSource:
    def item(name: str) -> TensorSource:
        return TensorSource(name, archive.spec(name), lambda each: archive.load_one(name, each))

    archive.check_whole()
    tied = archive.tied()
    return ArchiveSource([item(name) for name in archive if name not in tied], tied, archive.tree)


def given(tensors: Mapping[str, Tensor | Encoded], tree: Json | None) -> ArchiveSource:
    """Return a state of these tensors; those that are the same memory are stored once."""

    def item(name: str, x: Tensor) -> TensorSource:
        return TensorSource(name, Spec.of(x), lambda each: to_cpu(x))

    items: list[TensorSource] = []
    tied: dict[str, str] = {}
    homes: dict[object, str] = {}
    for name, value in tensors.items():
        if isinstance(value, Encoded):
            items.append(_encoded(name, value))
            continue
        home = homes.setdefault(_memory(name, value), name)
        if home != name:
            tied[name] = home
        elif isinstance(value, Tensor) and (kind := _kind_of(value)):
            items.append(_own_form(name, value, kind))
        else:
            items.append(item(name, value))
    return ArchiveSource(items, tied, tree)


def _encoded(name: str, value: Encoded) -> TensorSource:
    for path, leaf in value.leaves():
        check_storable(f"{name}: {path}", leaf)
    return TensorSource(name, value.spec, lambda each: value, runs_from_file=True)


@dataclass(frozen=True)
class TensorKind:
    """A tensor subclass that is stored in a form of its own."""

    parts: Callable[[Any], Iterable[tuple[str, Tensor]]]
    """Returns its plain tensors by name."""
    encode: Callable[[Any], Encoded | None]
    """Returns the form to store, or None to store the dense values."""
    dense: Callable[[Any], Tensor]


_KINDS: dict[type[Tensor], TensorKind] = {}


def register_tensor_kind(cls: type[Tensor], kind: TensorKind) -> None:
    """Let archives store tensors of this class."""
    _KINDS[cls] = kind


def _kind_of(x: Tensor) -> TensorKind | None:
    if type(x) is Tensor or type(x) is nn.Parameter:
        return None
    return next((kind for cls, kind in _KINDS.items() if isinstance(x, cls)), None)


def _own_form(name: str, x: Tensor, kind: TensorKind) -> TensorSource:
    encoded = kind.encode(x)
    if encoded is None:
        spec = Spec(x.dtype, tuple(x.shape))
        return TensorSource(name, spec, lambda each: to_cpu(kind.dense(x)))
    return _encoded(name, encoded)


def _memory(name: str, value: Tensor) -> object:
    """Check that a tensor can be stored, and return a key that tied tensors share."""
    kind = _kind_of(value)
    if kind is None:
        return memory_view(check_storable(name, value))
    leaves = [check_storable(f"{name}: {path}", leaf) for path, leaf in kind.parts(value)]
    return value.dtype, *map(memory_view, leaves)


def memory_view(x: Tensor) -> object:
    """Return what two tensors have in common if and only if they are the same memory."""
    if x.numel() == 0:
        return object()
    return (x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())


_DESCRIBED = 256
"""Bytes that say how a tensor differs from another one."""
_ALIGN = 64
"""What torch aligns memory to, and some kernels expect."""


def save(
    tensors: Mapping[str, Any] | Archive,
    path: StrPath,
    *,
    preset: str | Plan | Chooser | None = None,
    dialect: str = "slim",
    max_shard_size: int | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write tensors to a file, or into a folder if `path` is one or `max_shard_size` is given.

    What was there is replaced in one step once everything is written. `path` may be a URL that
    fsspec knows: files are then written to a temporary folder of this machine, and sent when they
    are complete; a folder that holds a model is not replaced there. Tensors come back bit for
    bit, unless the preset says otherwise; a tensor that its plan would make larger stays plain.
    Without a preset it is `lossless`, or `sparse` in the dialect `compressed-tensors`, which can
    say no more.

    A state may also hold numbers, text, dtypes, tuples and the like, which are stored as JSON; what
    would need pickle raises. A tensor that is there in encoded form (`slimtensors.plan.Encoded`) is
    stored in that form, whatever the preset.
    """
    return write(
        as_source(tensors),
        path,
        preset=presets.default(dialect) if preset is None else preset,
        dialect=dialect,
        max_shard_size=max_shard_size,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    )


def estimate(
    tensors: Mapping[str, Any] | Archive,
    *,
    preset: str | Plan | Chooser | None = None,
    dialect: str = "slim",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Tell what `save` would store, without writing anything."""
    state, how = as_source(tensors), dialects.find(dialect)
    choose = presets.find(presets.default(dialect) if preset is None else preset)
    with Workers(threads) as workers:
        done = _encode_all(state, choose, how, workers, progress, lambda pieces: None)
    return Written(done, state.tied, {}).summary()


def write(
    state: ArchiveSource,
    path: StrPath,
    *,
    preset: str | Plan | Chooser,
    dialect: str,
    max_shard_size: int | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Do what `save` does with a state that may still have to be read or computed."""
    return write_out(
        state,
        path,
        preset=preset,
        dialect=dialect,
        max_shard_size=max_shard_size,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    ).summary()


def write_out(
    state: ArchiveSource,
    path: StrPath,
    *,
    preset: str | Plan | Chooser,
    dialect: str,
    max_shard_size: int | str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> "Written":
    """Do what `write` does, and return all that is known of what was written."""
    choose, how = presets.find(preset), dialects.find(dialect)
    where = locate(path, storage_options=storage_options)
    with Workers(threads) as workers, _output(where, max_shard_size, state, how) as output:
        done = _encode_all(state, choose, how, workers, progress, output.add)
        order = [piece.name for result in done for piece in result.pieces]
        files = output.commit(order, partial(_describe, how.name, state, done, order))
    return Written(
        done, state.tied, {key: str(path) for path, keys in files.items() for key in keys}
    )


@dataclass(frozen=True)
class Done:
    """A tensor ready to be written, and how."""

    item: TensorSource
    packed: PackedTensor
    note: str

    @property
    def pieces(self) -> Sequence[TensorBytes]:
        """What it is in the file."""
        return self.packed.pieces

    def emptied(self) -> "Done":
        """Return this without the data."""
        pieces = [replace(piece, chunks=[]) for piece in self.pieces]
        return replace(self, packed=replace(self.packed, pieces=pieces))


@dataclass(frozen=True)
class Written:
    """What an archive was made of."""

    done: Sequence[Done]
    tied: Mapping[str, str]
    homes: Mapping[str, str]
    """The file of each piece."""

    def summary(self) -> Summary:
        """Return it in the words of `inspect`."""
        tensors = {done.item.name: self._stored(done) for done in self.done if done.pieces}
        aliases = [
            replace(tensors[home], name=name).tied_to(home) for name, home in self.tied.items()
        ]
        return Summary([*tensors.values(), *aliases], sorted(set(self.homes.values())))

    def _stored(self, done: Done) -> TensorSummary:
        spec, packed = done.item.spec, done.packed
        return TensorSummary(
            done.item.name,
            dtype_name(spec.dtype),
            spec.shape,
            str(packed.plan) if packed.plan else "plain",
            spec.nbytes,
            _size(done.pieces),
            self.homes.get(done.pieces[0].name, ""),
            done.note,
            packed.error,
            packed.parts,
        )


def _encode_all(
    state: ArchiveSource,
    choose: Chooser,
    how: Dialect,
    workers: Workers,
    progress: Progress | None,
    put: Callable[[Sequence[TensorBytes]], None],
) -> list[Done]:
    """Encode every tensor, hand its pieces to `put`, and return what was done in given order."""
    for item in state.items:
        how.check(item.name, item.spec)

    def one(item: TensorSource) -> Done:
        return _encode(item, choose, how, workers.each)

    # Largest items first, so that all tensors lie aligned although nothing pads them.
    ordered = sorted(state.items, key=lambda item: -item.spec.dtype.itemsize)
    done: dict[str, Done] = {}
    seen: set[str] = set()

    def put_away(result: Done) -> Done:
        for piece in result.pieces:
            if piece.name in seen:
                raise ConfigError(f"{piece.name}: is the name of a tensor and of a part of another")
            seen.add(piece.name)
        put(result.pieces)
        return result.emptied()

    # By `map`, because a loop variable would keep the data of one tensor until the next is ready.
    results = workers.in_order(one, ordered, lambda item: item.spec.nbytes)
    for result in map(put_away, results):
        done[result.item.name] = result
        if progress:
            progress(result.item.spec.nbytes)
    return [done[item.name] for item in state.items]


def _encode(item: TensorSource, choose: Chooser, how: Dialect, each: Each) -> Done:
    x = item.read(each)
    if x is None:
        return Done(item, PackedTensor([], None), "")
    if isinstance(x, PackedTensor):
        return Done(item, x, "")
    try:
        if isinstance(x, Encoded):
            return Done(item, how.encoded(item.name, x, each), "")
        choice = _choice(item.name, x, choose)
        if item.always_blob and choice.plan is None:
            choice = replace(choice, plan=Plan(Dense()))
        packed = how.packed(item.name, x, choice.plan, each)
    except (ConfigError, UnsupportedTensorError) as error:
        raise type(error)(f"{item.name}: {error}") from error
    if item.always_blob:
        return Done(item, packed, choice.note)
    size = _size(packed.pieces)
    if choice.plan is None or size < item.spec.nbytes:
        return Done(item, packed, choice.note)
    plain = how.packed(item.name, x, None, each)
    if size < _size(plain.pieces):
        return Done(item, packed, choice.note)
    note = f"{choice.plan} would take {size} bytes, plain takes {_size(plain.pieces)}"
    return Done(item, plain, choice.note or note)


def _choice(name: str, x: Tensor, choose: Chooser) -> Choice:
    if x.is_quantized:  # what can be chosen is how to store its integers
        inner = _choice(name, x.int_repr(), choose)
        then = {"q": inner.plan} if inner.plan else {}
        return Choice(Plan(TorchQuantized(), then), inner.note)
    choice = choose(name, x) if x.numel() else None
    if choice is None or isinstance(choice, Plan):
        return Choice(choice)
    if not isinstance(choice, Choice):
        kind = type(choice).__name__
        raise ConfigError(f"the function that chooses plans returned a {kind}")
    return choice


def _size(pieces: Sequence[TensorBytes]) -> int:
    return sum(piece.spec.nbytes for piece in pieces)


def _output(
    where: Location, max_shard_size: int | str | None, state: ArchiveSource, how: Dialect
) -> Output:
    # Room for the header: the names, shapes and offsets of all tensors, in as many parts as the
    # dialect makes of one; the outline of the rest, as text in text; and as much for each tensor
    # that is a difference as most need. Too low an estimate costs time, too high a few bytes.
    digits = len(str(sum(item.spec.nbytes for item in state.items)))
    text = sum(
        2 * len(item.name.encode()) + 2 * digits + 64 + 8 * len(item.spec.shape)
        for item in state.items
    )
    reserve = 256 + text * how.parts
    if state.tree is not None:
        reserve += len(json.dumps(json.dumps(state.tree)))
    if state.delta is not None:
        reserve += sum(len(item.name.encode()) + _DESCRIBED for item in state.items)
    if any(item.runs_from_file for item in state.items):
        reserve = ceil_div(reserve, _ALIGN) * _ALIGN
    limit = parse_size(max_shard_size)
    is_folder = limit is not None or where.is_folder()
    if isinstance(where, RemoteLocation):
        return RemoteOutput(where, is_folder=is_folder, max_shard_size=limit, reserve=reserve)
    assert isinstance(where, LocalLocation)
    if is_folder:
        return FolderOutput(where.path, max_shard_size=limit, reserve=reserve)
    return FileOutput(where.path, reserve=reserve)


def _describe(
    dialect: str,
    state: ArchiveSource,
    done: Sequence[Done],
    order: Sequence[str],
    names: Sequence[str],
    checksums: Mapping[str, int | None],
    table: str,
) -> dict[str, str]:
    """Return the metadata of the file that holds `names`; the first one also says the rest."""
    here = set(names)
    homes = {result.item.name for result in done if here & {p.name for p in result.pieces}}
    is_first = names[:1] == order[:1]
    manifest = FileManifest(
        dialect,
        [checksums[name] for name in names],
        tied={name: home for name, home in state.tied.items() if home in homes},
        plans={
            r.item.name: str(r.packed.plan)
            for r in done
            if r.packed.is_one_tensor and len(r.pieces) > 1 and r.item.name in homes
        },
        tree=state.tree if is_first else None,
        delta=state.delta if is_first else None,
    )
    return {"format": "pt", KEY: manifest.to_text(table)}
