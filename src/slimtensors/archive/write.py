"""Write archives: collect tensors, choose plans, encode, write."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from slimtensors.archive import dialects
from slimtensors.archive.dialects import KEY, Dialect, FileManifest, PackedTensor, slim
from slimtensors.archive.originals import find_originals, store_originals
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
    check_separate,
    locate,
    parse_size,
)
from slimtensors.tensor import Json, Spec, ceil_div, check_storable, dtype_name, to_cpu


@dataclass(frozen=True, kw_only=True)
class WriteOptions:
    """How tensors are written. The keyword arguments of `save`, as one value."""

    preset: str | Plan | Chooser | None = None
    """Preset name, plan, or function that chooses a plan. None: the default of the dialect."""
    dialect: str = "slim"
    max_shard_size: int | str | None = None
    """Maximum bytes per file, such as `"5GB"`. None: one file."""
    threads: int | None = None
    """Number of threads. None: one per core."""
    progress: Progress | None = None
    """Called with the number of bytes just processed."""
    storage_options: dict[str, Any] | None = None
    """Passed to fsspec when the path is a URL."""

    def chooser(self) -> Chooser:
        """Return the function that chooses a plan for each tensor."""
        return presets.find(presets.default(self.dialect) if self.preset is None else self.preset)


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
    """Save tensors to a file, or to a folder if `path` is one or `max_shard_size` is set.

    Lossless unless the preset rounds. A tensor that would grow stays plain. An existing file is
    replaced atomically, once everything is written; never that of an open archive being saved.

    Args:
        tensors: a state dict. Values that are not tensors (numbers, strings, tuples, dtypes, nested
            dicts) are stored as JSON; values that would need pickle raise. Tensors in encoded form
            (`slimtensors.codecs.plan.Encoded`) are stored as they are. An open `Archive` works too.
        path: local path or fsspec URL. Remote files are written locally, then uploaded.
        preset: preset name, plan, or function `(name, tensor)` that returns a plan. Default:
            `lossless`, or `sparse` for the dialect `compressed-tensors`.
        dialect: `slim` or `compressed-tensors`.
        max_shard_size: maximum bytes per file, such as `"5GB"`; writes shards and an index.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.

    Example:
        >>> import slimtensors, torch
        >>> summary = slimtensors.save({"weight": torch.zeros(256, 256)}, "model.safetensors")
        >>> summary.dense_bytes
        262144
    """
    options = WriteOptions(
        preset=preset,
        dialect=dialect,
        max_shard_size=max_shard_size,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    )
    if isinstance(tensors, Archive):
        check_separate(locate(path, storage_options=storage_options), tensors.paths())
    return write(as_source(tensors), path, options).summary()


def estimate(
    tensors: Mapping[str, Any] | Archive,
    *,
    preset: str | Plan | Chooser | None = None,
    dialect: str = "slim",
    threads: int | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Return the summary that `save` would return, without writing anything.

    Example:
        >>> import torch
        >>> from slimtensors.archive import estimate
        >>> round(estimate({"weight": torch.zeros(256, 256)}).ratio) > 100
        True
    """
    source = as_source(tensors)
    options = WriteOptions(preset=preset, dialect=dialect, threads=threads, progress=progress)
    encoder = _Encoder(options.chooser(), dialects.find(dialect), progress)
    with Workers(threads) as workers:
        written = encoder.encode_all(source, workers, lambda pieces: None)
    return WriteResult(written, source.tied, {}, source.copies).summary()


@dataclass(frozen=True)
class TensorSource:
    """A tensor to write, read or computed only when needed."""

    name: str
    spec: Spec
    read: Callable[[Each], Tensor | Encoded | PackedTensor | None]
    """Returns the tensor in main memory, or None if nothing is to be stored.

    An encoded or packed tensor is stored in that form.
    """
    runs_from_file: bool = False
    """Whether readers may map its parts from the file, so that they need alignment."""
    always_blob: bool = False
    """Whether to store a blob even if plain is smaller (residuals must not look like weights)."""


@dataclass(frozen=True)
class ArchiveSource:
    """The content of an archive to write."""

    items: Sequence[TensorSource]
    tied: Mapping[str, str] = field(default_factory=dict)
    """Alias -> name of one of the items."""
    tree: Json | None = None
    """Outline of the values that are not tensors (see `slimtensors.archive.tree`)."""
    delta: Mapping[str, Any] | None = None
    """How tensors differ from a base; complete once all items have been read."""
    originals: Json | None = None
    """Description of the plain files that contain these tensors; dropped if any is rounded."""
    header: bytes | None = None
    """Header to write instead of ours; the items are in the order of its offsets."""
    copies: Mapping[str, str] = field(default_factory=dict)
    """Name -> name of one of the items with the same bits, in other memory."""

    def __post_init__(self) -> None:
        for name in (*(item.name for item in self.items), *self.tied, *self.copies):
            check_name(name)

    def with_copies(self, copies: Mapping[str, str]) -> "ArchiveSource":
        """Return the source with some of its items stored as copies of others."""
        assert copies.keys().isdisjoint(self.tied.values()), "a copy has tied names"
        items = [item for item in self.items if item.name not in copies]
        return replace(self, items=items, copies=copies)

    def expand_copies(self) -> "ArchiveSource":
        """Return the source with all copies as items, for files that other programs read."""
        items = {item.name: item for item in self.items}
        extra = [replace(items[home], name=name) for name, home in self.copies.items()]
        return replace(self, items=[*self.items, *extra], copies={})


def as_source(tensors: Mapping[str, Any] | Archive) -> ArchiveSource:
    """Return the source for a state dict or an open archive; raise if a value cannot be stored."""
    if isinstance(tensors, Archive):
        return _source_from_archive(tensors)
    return source_from_tensors(*flatten(tensors))


def _source_from_archive(archive: Archive) -> ArchiveSource:
    def make_item(name: str) -> TensorSource:
        return TensorSource(name, archive.spec(name), lambda each: archive.load_one(name, each))

    archive.check_not_delta()
    tied = archive.tied()
    items = [make_item(name) for name in archive if name not in tied]
    originals = store_originals(find_originals(archive), archive.keys(), archive.path)
    source = ArchiveSource(items, tied, archive.tree, originals=originals)
    return source.with_copies(archive.copies())


def source_from_tensors(
    tensors: Mapping[str, Tensor | Encoded], tree: Json | None
) -> ArchiveSource:
    """Return the source for tensors in memory; tensors that share memory are stored once."""

    def make_item(name: str, x: Tensor) -> TensorSource:
        return TensorSource(name, Spec.of(x), lambda each: to_cpu(x))

    items: list[TensorSource] = []
    tied: dict[str, str] = {}
    first_names: dict[object, str] = {}
    for name, value in tensors.items():
        if isinstance(value, Encoded):
            items.append(_encoded_item(name, value))
            continue
        first = first_names.setdefault(_check_tensor(name, value), name)
        if first != name:
            tied[name] = first
        elif isinstance(value, Tensor) and (kind := _find_kind(value)):
            items.append(_subclass_item(name, value, kind))
        else:
            items.append(make_item(name, value))
    return ArchiveSource(items, tied, tree)


def memory_key(x: Tensor) -> object:
    """Return a key that is equal for two tensors if and only if they are the same memory."""
    if x.numel() == 0:
        return object()
    return (x.data_ptr(), x.device, x.dtype, x.shape, x.stride(), x.is_conj(), x.is_neg())


@dataclass(frozen=True)
class TensorKind:
    """How a tensor subclass is stored."""

    parts: Callable[[Any], Iterable[tuple[str, Tensor]]]
    """Returns its plain tensors by name."""
    encode: Callable[[Any], Encoded | None]
    """Returns the encoded form, or None to store the dense values."""
    dense: Callable[[Any], Tensor]


_KINDS: dict[type[Tensor], TensorKind] = {}


def register_tensor_kind(cls: type[Tensor], kind: TensorKind) -> None:
    """Register how archives store tensors of this class."""
    _KINDS[cls] = kind


def _find_kind(x: Tensor) -> TensorKind | None:
    if type(x) is Tensor or type(x) is nn.Parameter:
        return None
    return next((kind for cls, kind in _KINDS.items() if isinstance(x, cls)), None)


def _subclass_item(name: str, x: Tensor, kind: TensorKind) -> TensorSource:
    encoded = kind.encode(x)
    if encoded is None:
        spec = Spec(x.dtype, tuple(x.shape))
        return TensorSource(name, spec, lambda each: to_cpu(kind.dense(x)))
    return _encoded_item(name, encoded)


def _encoded_item(name: str, value: Encoded) -> TensorSource:
    for path, leaf in value.leaves():
        check_storable(f"{name}: {path}", leaf)
    return TensorSource(name, value.spec, lambda each: value, runs_from_file=True)


def _check_tensor(name: str, value: Tensor) -> object:
    """Raise if a tensor cannot be stored; return a key that tied tensors share."""
    kind = _find_kind(value)
    if kind is None:
        return memory_key(check_storable(name, value))
    leaves = [check_storable(f"{name}: {path}", leaf) for path, leaf in kind.parts(value)]
    return value.dtype, *map(memory_key, leaves)


def write(source: ArchiveSource, path: StrPath, options: WriteOptions) -> "WriteResult":
    """Write `source` to a file, or to a folder if `path` is one or a shard size is set."""
    dialect = dialects.find(options.dialect)
    if dialect.name != slim.NAME:
        source = source.expand_copies()
    encoder = _Encoder(options.chooser(), dialect, options.progress)
    location = locate(path, storage_options=options.storage_options)
    limit = parse_size(options.max_shard_size)
    with (
        Workers(options.threads) as workers,
        _open_output(location, limit, source, dialect) as output,
    ):
        written = encoder.encode_all(source, workers, output.add)
        order = [piece.name for tensor in written for piece in tensor.pieces]
        files = output.commit(order, partial(_make_metadata, dialect.name, source, written, order))
    paths = {key: str(path) for path, keys in files.items() for key in keys}
    return WriteResult(written, source.tied, paths, source.copies)


@dataclass(frozen=True)
class WrittenTensor:
    """A tensor in the form in which it is written."""

    item: TensorSource
    packed: PackedTensor
    note: str

    @property
    def pieces(self) -> Sequence[TensorBytes]:
        """Its entries in the file."""
        return self.packed.pieces

    @property
    def stored_bytes(self) -> int:
        """Bytes of all entries."""
        return sum(piece.spec.nbytes for piece in self.pieces)

    def without_data(self) -> "WrittenTensor":
        """Return a copy that does not keep the data alive."""
        pieces = [replace(piece, chunks=[]) for piece in self.pieces]
        return replace(self, packed=replace(self.packed, pieces=pieces))


@dataclass(frozen=True)
class WriteResult:
    """Everything `write` did."""

    tensors: Sequence[WrittenTensor]
    tied: Mapping[str, str]
    files: Mapping[str, str]
    """Entry -> path of its file."""
    copies: Mapping[str, str] = field(default_factory=dict)

    def summary(self) -> Summary:
        """Return the summary that `inspect` would return."""
        tensors = {t.item.name: self._summarize(t) for t in self.tensors if t.pieces}
        aliases = [
            replace(tensors[home], name=name).tied_to(home) for name, home in self.tied.items()
        ]
        aliases += [
            replace(tensors[home], name=name).copy_of(home) for name, home in self.copies.items()
        ]
        return Summary([*tensors.values(), *aliases], sorted(set(self.files.values())))

    def _summarize(self, tensor: WrittenTensor) -> TensorSummary:
        spec, packed = tensor.item.spec, tensor.packed
        return TensorSummary(
            tensor.item.name,
            dtype_name(spec.dtype),
            spec.shape,
            str(packed.plan) if packed.plan else "plain",
            spec.nbytes,
            tensor.stored_bytes,
            self.files.get(tensor.pieces[0].name, ""),
            tensor.note,
            packed.error,
            packed.parts,
        )


@dataclass(frozen=True)
class _Encoder:
    choose: Chooser
    dialect: Dialect
    progress: Progress | None

    def encode_all(
        self,
        source: ArchiveSource,
        workers: Workers,
        put: Callable[[Sequence[TensorBytes]], None],
    ) -> list[WrittenTensor]:
        """Encode every tensor, pass its pieces to `put`, and return the results without data."""
        for item in source.items:
            self.dialect.check(item.name, item.spec)

        ordered = source.items
        if source.header is None:
            # Largest item size first: all tensors are aligned although nothing pads them.
            ordered = sorted(ordered, key=lambda item: -item.spec.dtype.itemsize)
        written: dict[str, WrittenTensor] = {}
        names: set[str] = set()

        def put_pieces(tensor: WrittenTensor) -> WrittenTensor:
            for piece in tensor.pieces:
                if piece.name in names:
                    raise ConfigError(
                        f"{piece.name}: tensor name conflicts with a part of another tensor"
                    )
                names.add(piece.name)
            put(tensor.pieces)
            return tensor.without_data()

        results = workers.in_order(
            lambda item: self._encode(item, workers.each), ordered, lambda item: item.spec.nbytes
        )
        # `map`, because a loop variable would keep the data of one tensor until the next is ready.
        for tensor in map(put_pieces, results):
            written[tensor.item.name] = tensor
            if self.progress:
                self.progress(tensor.item.spec.nbytes)
        return [written[item.name] for item in source.items]

    def _encode(self, item: TensorSource, each: Each) -> WrittenTensor:
        x = item.read(each)
        if x is None:
            return WrittenTensor(item, PackedTensor([], None), "")
        if isinstance(x, PackedTensor):
            return WrittenTensor(item, x, "")
        try:
            if isinstance(x, Encoded):
                return WrittenTensor(item, self.dialect.pack_encoded(item.name, x, each), "")
            choice = _choose_plan(item.name, x, self.choose)
            if item.always_blob and choice.plan is None:
                choice = replace(choice, plan=Plan(Dense()))
            packed = self.dialect.pack(item.name, x, choice.plan, each)
        except (ConfigError, UnsupportedTensorError) as error:
            raise type(error)(f"{item.name}: {error}") from error
        coded = WrittenTensor(item, packed, choice.note)
        size = coded.stored_bytes
        if item.always_blob or choice.plan is None or size < item.spec.nbytes:
            return coded
        note = f"{choice.plan} would take {size} bytes, plain takes "
        plain = WrittenTensor(item, self.dialect.pack(item.name, x, None, each), "")
        if size < plain.stored_bytes:
            return coded
        return replace(plain, note=choice.note or f"{note}{plain.stored_bytes}")


def _choose_plan(name: str, x: Tensor, choose: Chooser) -> Choice:
    if x.is_quantized:  # only the storage of its integers can be chosen
        inner = _choose_plan(name, x.int_repr(), choose)
        then = {"q": inner.plan} if inner.plan else {}
        return Choice(Plan(TorchQuantized(), then), inner.note)
    choice = choose(name, x) if x.numel() else None
    if choice is None or isinstance(choice, Plan):
        return Choice(choice)
    if not isinstance(choice, Choice):
        kind = type(choice).__name__
        raise ConfigError(f"the preset function returned a {kind}; expected a Plan or None")
    return choice


_DELTA_ENTRY_BYTES = 256
"""Estimated header bytes that describe how one tensor differs from its base."""
_ALIGN = 64
"""Alignment of torch's memory, expected by some kernels."""


def _open_output(
    location: Location, limit: int | None, source: ArchiveSource, dialect: Dialect
) -> Output:
    # Reserve space for the header: names, shapes and offsets of all tensors, times the maximum
    # number of parts; the outline, as JSON in JSON; the entries of a delta. Too low an estimate
    # costs time, too high a few bytes.
    digits = len(str(sum(item.spec.nbytes for item in source.items)))
    text = sum(
        2 * len(item.name.encode()) + 2 * digits + 64 + 8 * len(item.spec.shape)
        for item in source.items
    )
    reserve = 256 + text * dialect.max_parts
    copies = source.copies.items()
    reserve += sum(len(name.encode()) + len(home.encode()) + 10 for name, home in copies)
    if source.tree is not None:
        reserve += len(json.dumps(json.dumps(source.tree)))
    if source.delta is not None:
        reserve += sum(len(item.name.encode()) + _DELTA_ENTRY_BYTES for item in source.items)
    if source.originals is not None:
        reserve += len(json.dumps(json.dumps(source.originals)))
    if any(item.runs_from_file for item in source.items):
        reserve = ceil_div(reserve, _ALIGN) * _ALIGN
    is_folder = limit is not None or location.is_folder()
    header = source.header
    if isinstance(location, RemoteLocation):
        return RemoteOutput(
            location, is_folder=is_folder, max_shard_size=limit, reserve=reserve, header=header
        )
    assert isinstance(location, LocalLocation)
    if is_folder:
        return FolderOutput(location.path, max_shard_size=limit, reserve=reserve)
    return FileOutput(location.path, reserve=reserve, header=header)


def _make_metadata(
    dialect: str,
    source: ArchiveSource,
    written: Sequence[WrittenTensor],
    order: Sequence[str],
    names: Sequence[str],
    checksums: Mapping[str, int | None],
    table: str,
    generation: str | None,
) -> dict[str, str]:
    """Return the metadata of a file with the entries `names`; the first describes the state."""
    entries = set(names)
    tensors = {t.item.name for t in written if entries & {piece.name for piece in t.pieces}}
    is_first = names[:1] == order[:1]
    is_lossy = any(t.packed.plan is not None and t.packed.plan.is_lossy for t in written)
    manifest = FileManifest(
        dialect,
        [checksums[name] for name in names],
        tied=_tie_entries(source.tied, [t for t in written if t.item.name in tensors]),
        copies={name: home for name, home in source.copies.items() if home in tensors},
        plans={
            t.item.name: str(t.packed.plan)
            for t in written
            if t.packed.is_one_tensor and len(t.pieces) > 1 and t.item.name in tensors
        },
        tree=source.tree if is_first else None,
        delta=source.delta if is_first else None,
        source=source.originals if is_first and not is_lossy else None,
        generation=generation,
    )
    return {"format": "pt", KEY: manifest.to_text(table)}


def _tie_entries(tied: Mapping[str, str], written: Sequence[WrittenTensor]) -> dict[str, str]:
    """Return tied names of tensors, or of their entries where these are tensors of their own."""
    tensors = {t.item.name: t for t in written}
    result: dict[str, str] = {}
    for name, home in tied.items():
        found = tensors.get(home)
        if found is not None and found.packed.is_one_tensor:
            result[name] = home
        elif found is not None:
            suffixes = [piece.name.removeprefix(home) for piece in found.pieces]
            result |= {name + suffix: home + suffix for suffix in suffixes}
    return result
