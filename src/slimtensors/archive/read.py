"""Read archives: open, load, inspect."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor

from slimtensors._moved import Renamed
from slimtensors.archive import dialects
from slimtensors.archive.dialects import BlobMember, Member, PackedTensor, PlainMember
from slimtensors.archive.dialects.compressed_tensors import SparseMember
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.tree import unflatten
from slimtensors.codecs.plan import Encoded, Plan, encode
from slimtensors.codecs.statistics import order0
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, report_malformed
from slimtensors.parallel import Each, Workers, serially
from slimtensors.storage import (
    LocalLocation,
    Location,
    StoredFile,
    StrPath,
    explain_missing,
    locate,
    open_file,
    open_files,
    open_listed,
    weight_files,
)
from slimtensors.tensor import Spec, dtype_name

if TYPE_CHECKING:
    from slimtensors.archive.bases import Base

T = TypeVar("T")

AsCompressed = Callable[[Encoded, Each], Tensor | None]
"""Returns a tensor that stays compressed in memory, or None if its plan does not support that."""

_as_compressed: AsCompressed | None = None


def register_runtime(convert: AsCompressed) -> None:
    """Register the function that makes compressed tensors for `load(run_compressed=True)`."""
    global _as_compressed
    _as_compressed = convert


def _find_runtime() -> AsCompressed:
    if _as_compressed is None:
        import_module("slimtensors.runtime")  # a higher layer, which calls register_runtime
    assert _as_compressed is not None
    return _as_compressed


Progress = Callable[[int], object]
"""Called with the number of bytes just processed."""


class Archive:
    """An open file or folder. Opening reads headers only; tensors are decoded on demand.

    The tensors of a delta are its residuals; `slimtensors.open` returns the model instead.

    Example:
        >>> import slimtensors, torch
        >>> _ = slimtensors.save({"weight": torch.eye(256)}, "model.safetensors")
        >>> with slimtensors.open("model.safetensors") as archive:
        ...     print(archive.keys(), archive.get_tensor("weight").shape)
        ['weight'] torch.Size([256, 256])
    """

    def __init__(self, path: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
        location = locate(path, storage_options=storage_options)
        if isinstance(location, LocalLocation) and not location.path.exists():
            raise FileNotFoundError(explain_missing(str(location)))
        self._open(location, open_files(location, dialects.read_generation), is_listed=True)

    @classmethod
    def from_place(cls, location: Location) -> Self:
        """Open the file or folder at a location."""
        archive = cls.__new__(cls)
        files = open_files(location, dialects.read_generation)
        archive._open(location, files, is_listed=True)
        return archive

    @classmethod
    def from_files(cls, paths: Sequence[Path]) -> Self:
        """Open these local files as one archive; an index is ignored."""
        archive = cls.__new__(cls)
        places = [LocalLocation(path) for path in paths]
        files = open_listed(places, dialects.read_generation)
        archive._open(LocalLocation(paths[0].parent), files)
        return archive

    @classmethod
    def from_location(cls, location: Location) -> Self:
        """Open one file."""
        archive = cls.__new__(cls)
        archive._open(location, [open_file(location)])
        return archive

    def _open(
        self, location: Location, files: list[StoredFile], *, is_listed: bool = False
    ) -> None:
        self.location, self.path = location, str(location)
        self._files, self._is_closed, self._is_listed = files, False, is_listed
        contents = dialects.read_contents(files)
        self._members, self.tree, self.delta = contents.members, contents.tree, contents.delta
        self.owners = contents.owners
        """Entry of a file -> name of the tensor it belongs to."""
        self._copies = contents.copies
        self.sources = contents.sources
        """File -> description of the plain files from which it was made."""
        self.base: Base | None = None
        """The base of a delta that is read as the model it represents."""
        self.residuals: Archive | None = None
        """The delta as it is stored, if it is read as the model it represents."""

    def resolve(self, members: Mapping[str, Member], base: "Base | None") -> "Archive":
        """Return the model that this delta represents, with these tensors."""
        model = copy(self)
        model._members, model.base, model.residuals = dict(members), base, self
        model.owners = {name: name for name in members}
        return model

    def select(self, names: Iterable[str]) -> "Archive":
        """Return an archive with a subset of the tensors."""
        part = copy(self)
        part._members = {name: self._find(name) for name in names}
        if len(part) < len(self):
            part.tree = None  # it would refer to tensors that are not selected
            part.sources = {}
        return part

    at, of_files = Renamed("from_location"), Renamed("from_files")
    encoded, packed = Renamed("read_encoded"), Renamed("read_packed")
    check_whole = Renamed("check_not_delta")

    @property
    def is_delta(self) -> bool:
        """Whether the tensors are differences instead of weights."""
        return self.delta is not None and self.residuals is None

    def check_not_delta(self) -> None:
        """Raise if this is a delta, which contains differences instead of weights."""
        if self.is_delta:
            raise ConfigError(f"{self.path} is a delta; restore it first")

    def keys(self) -> list[str]:
        """Return the names of all tensors in the order they were saved, tied names last."""
        return list(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        return self._query(name, lambda member: member.spec())

    def plan(self, name: str) -> Plan | None:
        """Return the plan of a tensor, or None if it is plain."""
        return self._query(name, lambda member: member.info().plan)

    def info(self, name: str) -> TensorSummary:
        """Return how a tensor is stored."""
        member = self._find(name)
        info = self._query(name, lambda member: member.info())
        return TensorSummary(
            name,
            dtype_name(info.spec.dtype),
            info.spec.shape,
            info.codec or (str(info.plan) if info.plan else "plain"),
            info.spec.nbytes,
            member.stored_bytes,
            member.file.name,
            error=info.error,
            parts=info.parts,
        )

    def tied(self) -> dict[str, str]:
        """Return {alias: name} for tensors that share storage with an earlier one."""
        first: dict[int, str] = {}
        return {
            name: home
            for name, member in self._members.items()
            if (home := first.setdefault(id(member), name)) != name
        }

    def copies(self) -> dict[str, str]:
        """Return {name: name} for tensors stored once with the same bits; loaded, each is new."""
        pairs = self._copies.items()
        return {name: home for name, home in pairs if name in self and home in self}

    @property
    def files(self) -> Sequence[StoredFile]:
        """The open files."""
        return self._files

    def paths(self) -> list[str]:
        """Return all paths or URLs that are read: the one that was opened, and its files."""
        base = self.base.paths() if self.base else []
        return [self.path, *(file.name for file in self._files), *base]

    @property
    def has_index(self) -> bool:
        """Whether the files were found through an index."""
        return self._is_listed and len(weight_files(self.location)) > 1

    def member(self, name: str) -> Member:
        """Return a tensor that is described, but not read yet."""
        return self._find(name)

    def stored_bytes(self, name: str) -> int:
        """Return the bytes of a tensor in its file."""
        return self._find(name).stored_bytes

    def shards(self) -> dict[str, list[str]]:
        """Return {file name: names of its tensors}."""
        shards: dict[str, list[str]] = {}
        for name, member in self._members.items():
            shards.setdefault(member.file.key, []).append(name)
        return shards

    def summary(self) -> Summary:
        """Return how all tensors are stored."""
        return self._summarize(self.info)

    def bounds(self, *, threads: int | None = None, progress: Progress | None = None) -> Summary:
        """Return the summary with the order-0 entropy of every tensor.

        Reads and decodes everything. For rounded tensors, this is the entropy of their integers
        and scales. `progress` receives stored bytes.
        """
        homes = self.tied() | self.copies()

        def measure(name: str) -> TensorSummary:
            info = self.info(name)
            exact = self._query(name, lambda member: member.load_exact(workers.each))
            bits = sum(map(order0, exact))
            return replace(info, bound=bits / info.items if info.items else 0.0)

        with Workers(threads) as workers:
            names = [name for name in self if name not in homes]
            measured: dict[str, TensorSummary] = {}
            results = workers.in_order(measure, names, self.stored_bytes)
            for name, info in zip(names, results, strict=True):
                measured[name] = info
                if progress:
                    progress(info.stored_bytes)
        return self._summarize(lambda name: measured[homes.get(name, name)])

    def _summarize(self, describe: Callable[[str], TensorSummary]) -> Summary:
        tied, copies = self.tied(), self.copies()

        def summarize(name: str) -> TensorSummary:
            found = replace(describe(name), name=name)
            if name in tied:
                return found.tied_to(tied[name])
            return found.copy_of(copies[name]) if name in copies else found

        return Summary([summarize(name) for name in self], [file.name for file in self._files])

    def get_tensor(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        """Read and decode one tensor."""
        self.check_not_delta()
        return self.load_one(name, serially).to(device)

    def items(
        self,
        *,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        run_compressed: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor) pairs, decoding ahead in other threads.

        Tied names yield the same tensor. `run_compressed` as in `load`.
        """
        read = self.load_compressed if run_compressed else self.load_one
        self.check_not_delta()
        tied = self.tied()
        shared: dict[str, Tensor] = {}
        homes = set(tied.values())

        def load_tensor(name: str) -> Tensor:
            return read(name, workers.each).to(device)

        with Workers(threads) as workers:
            names = [name for name in self if name not in tied]
            results = workers.in_order(load_tensor, names, self.stored_bytes)
            for name, x in zip(names, results, strict=True):
                if name in homes:
                    shared[name] = x
                yield name, x
        yield from ((name, shared[home]) for name, home in tied.items())

    def load_one(self, name: str, each: Each) -> Tensor:
        """Read and decode one tensor, in parallel if `each` is."""
        return self._query(name, lambda member: member.load(each))

    def has_rows(self, name: str) -> bool:
        """Return True if rows of a tensor can be read without reading all of it."""
        member = self._find(name)
        return isinstance(member, PlainMember) and member.has_rows

    def load_rows(self, name: str, begin: int, end: int) -> Tensor:
        """Read the rows `begin` to `end` of a tensor for which `has_rows` is True."""
        member = self._find(name)
        assert isinstance(member, PlainMember), name
        return member.load_rows(begin, end)

    def read_encoded(self, name: str, each: Each) -> Encoded | None:
        """Return a tensor in encoded form, or None if it is plain."""

        def read(member: Member) -> Encoded | None:
            return member.read_encoded(each) if isinstance(member, BlobMember) else None

        return self._query(name, read)

    def read_packed(self, name: str) -> PackedTensor | None:
        """Return the blob of a tensor, to be written to another file; None if it has no blob."""
        member = self._find(name)
        return member.read_packed(name) if isinstance(member, BlobMember) else None

    def load_compressed(self, name: str, each: Each) -> Tensor:
        """Return a tensor that stays compressed in memory where its plan allows it, else decode it.

        Checksums are verified once; parts are mapped from the file without a copy.
        """

        def read(member: Member) -> Tensor:
            if isinstance(member, BlobMember):
                compressed = _find_runtime()(member.read_encoded(each), each)
                if compressed is not None:
                    member.file.release(member.entry)  # mapped parts are read again on use
                    return compressed
            x = member.load(each)
            if isinstance(member, SparseMember):
                # Encoded again: rows of the stored mask are padded, those of the codec are not.
                compressed = _find_runtime()(encode(member.plan, x, each), each)
                return x if compressed is None else compressed
            return x

        return self._query(name, read)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._files, self._members, self._is_closed = [], {}, True

    def _find(self, name: str) -> Member:
        if self._is_closed:
            raise ValueError(f"{self.path}: archive is closed")
        if name not in self._members:
            raise KeyError(f"{self.path}: no tensor named {name!r}")
        return self._members[name]

    def _query(self, name: str, read: Callable[[Member], T]) -> T:
        """Return `read` of a tensor; errors get the names of file and tensor."""
        member = self._find(name)
        with report_malformed(f"{member.file.name}: {name}"):
            return read(member)


def open(
    path: StrPath,
    *,
    base: "StrPath | Archive | None" = None,
    storage_options: dict[str, Any] | None = None,
) -> Archive:
    """Open a file or folder; read its headers, and tensors on demand.

    A delta is read as the model that it represents. Its base is `base`, else a model beside the
    delta, in the cache of the hub, or in a folder of `SLIMTENSORS_BASES`; `archive.base.found`
    describes it. Raises `MismatchError` if none has the tensors that the delta needs.

    Args:
        path: a safetensors file, a folder, an index file, or a URL supported by fsspec.
        base: the base of a delta, a path or an open archive.
        storage_options: passed to fsspec.

    Example:
        >>> import slimtensors, torch
        >>> _ = slimtensors.save({"weight": torch.eye(256)}, "model.safetensors")
        >>> with slimtensors.open("model.safetensors") as archive:
        ...     archive.info("weight").dense_bytes
        262144
    """
    return open_archive(path, storage_options, base=base)


def open_stored(
    archive: StrPath | Archive, storage_options: dict[str, Any] | None = None
) -> Archive:
    """Open a path, a delta as it is stored; return an archive that is already open."""
    if isinstance(archive, Archive):
        return archive
    return Archive(archive, storage_options=storage_options)


def open_archive(
    archive: StrPath | Archive,
    storage_options: dict[str, Any] | None = None,
    *,
    base: StrPath | Archive | None = None,
) -> Archive:
    """Open a path, or use an archive that is already open; a delta is read as a model."""
    from slimtensors.archive.bases import is_resolvable, resolve  # which open candidates

    opened = open_stored(archive, storage_options)
    if is_resolvable(opened):
        return resolve(opened, base, storage_options)
    if base is not None:
        raise ConfigError(f"{opened.path} is not a delta that needs a base; omit base")
    return opened


def load(
    path: StrPath,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    run_compressed: bool = False,
    base: StrPath | Archive | None = None,
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Load a file or folder into a dict, as it was passed to `save`. Reads any safetensors file.

    Args:
        path: a safetensors file, a folder, an index file, or a URL supported by fsspec.
        device: device of the returned tensors.
        threads: number of threads; default: one per core.
        run_compressed: keep quantized and sparse matrices compressed in memory
            (`slimtensors.runtime`), mapped from the file, which must not change meanwhile.
        base: the base of a delta; by default, it is searched for as `open` does.
        storage_options: passed to fsspec.

    Example:
        >>> import slimtensors, torch
        >>> _ = slimtensors.save({"weight": torch.eye(256), "step": 3}, "state.safetensors")
        >>> slimtensors.load("state.safetensors")["step"]
        3
    """
    with open(path, base=base, storage_options=storage_options) as archive:
        tensors = dict(archive.items(device=device, threads=threads, run_compressed=run_compressed))
        return rebuild_state(archive, tensors)


def rebuild_state(archive: Archive, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return the nested state that was saved; `tensors` are those of the archive."""
    if archive.tree is None:
        return tensors
    try:
        state = unflatten(archive.tree, tensors)
    except FormatError as error:
        raise type(error)(f"{archive.path}: {error}") from error
    if not isinstance(state, dict):
        raise CorruptFileError(f"{archive.path}: expected a dict, got {type(state).__name__}")
    return state


def inspect(path: StrPath, *, storage_options: dict[str, Any] | None = None) -> Summary:
    """Return how every tensor of a file or folder is stored; reads headers only.

    For a delta, these are the residuals; unchanged tensors are not stored.

    Example:
        >>> import slimtensors, torch
        >>> _ = slimtensors.save({"weight": torch.eye(256)}, "model.safetensors")
        >>> summary = slimtensors.inspect("model.safetensors")
        >>> summary.tensors[0].name, summary.dense_bytes
        ('weight', 262144)
    """
    with Archive(path, storage_options=storage_options) as archive:
        return archive.summary()
