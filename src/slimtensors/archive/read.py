"""Read archives: open, load, inspect."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import torch
from torch import Tensor

from slimtensors.archive import dialects
from slimtensors.archive.dialects import BlobMember, Member, PackedTensor, PlainMember
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.tree import unflatten
from slimtensors.codecs.plan import Encoded, Plan
from slimtensors.codecs.statistics import order0
from slimtensors.errors import ConfigError, CorruptFileError, FormatError
from slimtensors.parallel import Each, Workers, serially
from slimtensors.storage import (
    LocalLocation,
    Location,
    StoredFile,
    StrPath,
    locate,
    open_file,
    open_files,
)
from slimtensors.tensor import Spec, dtype_name

Answer = TypeVar("Answer")

AsCompressed = Callable[[Encoded, Each], Tensor | None]
"""Returns a tensor that stays compressed in memory, or None if its encoding cannot."""

_as_compressed: AsCompressed | None = None


def register_runtime(convert: AsCompressed) -> None:
    """Set how encoded tensors become tensors that stay compressed in memory."""
    global _as_compressed
    _as_compressed = convert


def _find_runtime() -> AsCompressed:
    if _as_compressed is None:
        import_module("slimtensors.runtime")  # a higher layer: it registers itself here
    assert _as_compressed is not None
    return _as_compressed


Progress = Callable[[int], object]
"""Called with the number of bytes that were just done."""


class Archive:
    """An open file or folder: names at once, tensors when asked for."""

    def __init__(self, path: StrPath, *, storage_options: dict[str, Any] | None = None) -> None:
        where = locate(path, storage_options=storage_options)
        if isinstance(where, LocalLocation) and not where.path.exists():
            raise FileNotFoundError(f"{where}: no such file or folder")
        self._hold(str(where), open_files(where))

    @classmethod
    def of_files(cls, paths: Sequence[Path]) -> Self:
        """Open these files as one archive, whatever index there is."""
        archive = cls.__new__(cls)
        archive._hold(str(paths[0].parent), [open_file(LocalLocation(path)) for path in paths])
        return archive

    @classmethod
    def at(cls, where: Location) -> Self:
        """Open the one file that lies there."""
        archive = cls.__new__(cls)
        archive._hold(str(where), [open_file(where)])
        return archive

    def _hold(self, path: str, files: list[StoredFile]) -> None:
        self.path, self._files, self._is_closed = path, files, False
        contents = dialects.read_contents(files)
        self._members, self.tree, self.delta = contents.members, contents.tree, contents.delta
        self.owners = contents.owners
        """Which tensor each entry of the files belongs to: itself, or one that is in parts."""

    def select(self, names: Iterable[str]) -> "Archive":
        """Return an archive of only these tensors of this one."""
        part = copy(self)
        part._members = {name: self._find(name) for name in names}
        if len(part) < len(self):
            part.tree = None  # an outline of all would name tensors that are not there
        return part

    def check_whole(self) -> None:
        """Raise if this is a delta, whose tensors are not those of the model."""
        if self.delta is not None:
            raise ConfigError(f"{self.path}: is a difference from another model; restore it first")

    def keys(self) -> list[str]:
        """List the names of all tensors in the order they were saved, tied names last."""
        return list(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def spec(self, name: str) -> Spec:
        """Return dtype and shape of a tensor."""
        return self._told(name, lambda member: member.spec())

    def plan(self, name: str) -> Plan | None:
        """Return the plan by which a tensor is stored; none if it is plain."""
        return self._told(name, lambda member: member.about().plan)

    def info(self, name: str) -> TensorSummary:
        """Return how a tensor is stored."""
        member = self._find(name)
        about = self._told(name, lambda member: member.about())
        return TensorSummary(
            name,
            dtype_name(about.spec.dtype),
            about.spec.shape,
            str(about.plan) if about.plan else "plain",
            about.spec.nbytes,
            member.stored_bytes,
            member.file.name,
            error=about.error,
            parts=about.parts,
        )

    def tied(self) -> dict[str, str]:
        """Return the names that stand for a tensor stored under another name, and that name."""
        first: dict[int, str] = {}
        return {
            name: home
            for name, member in self._members.items()
            if (home := first.setdefault(id(member), name)) != name
        }

    @property
    def files(self) -> Sequence[StoredFile]:
        """The files that it lies in."""
        return self._files

    def stored_bytes(self, name: str) -> int:
        """Return what a tensor costs in its file."""
        return self._find(name).stored_bytes

    def shards(self) -> dict[str, list[str]]:
        """Return the files, by their names in the folder, and the tensors that each holds."""
        found: dict[str, list[str]] = {}
        for name, member in self._members.items():
            found.setdefault(member.file.key, []).append(name)
        return found

    def summary(self) -> Summary:
        """Return how everything is stored."""
        return self._summary(self.info)

    def bounds(self, *, threads: int | None = None, progress: Progress | None = None) -> Summary:
        """Return how everything is stored, and the order-0 entropy of all tensors.

        Everything is read and decoded for it. Tensors stored with rounding count as what they were
        rounded to: their integers and scales. `progress` counts stored bytes.
        """
        tied = self.tied()

        def one(name: str) -> TensorSummary:
            info = self.info(name)
            exact = self._told(name, lambda member: member.load_exact(workers.each))
            bits = sum(map(order0, exact))
            return replace(info, bound=bits / info.items if info.items else 0.0)

        with Workers(threads) as workers:
            names = [name for name in self if name not in tied]
            found: dict[str, TensorSummary] = {}
            results = workers.in_order(one, names, self.stored_bytes)
            for name, info in zip(names, results, strict=True):
                found[name] = info
                if progress:
                    progress(info.stored_bytes)
        return self._summary(lambda name: found[tied.get(name, name)])

    def _summary(self, about: Callable[[str], TensorSummary]) -> Summary:
        tied = self.tied()
        return Summary(
            [
                replace(about(name), name=name).tied_to(tied[name]) if name in tied else about(name)
                for name in self
            ],
            [file.name for file in self._files],
        )

    def get_tensor(self, name: str, *, device: torch.device | str = "cpu") -> Tensor:
        """Read and decode one tensor."""
        self.check_whole()
        return self.load_one(name, serially).to(device)

    def items(
        self,
        *,
        device: torch.device | str = "cpu",
        threads: int | None = None,
        run_compressed: bool = False,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor with its name, decoding the next ones meanwhile.

        Tied names yield the same tensor. `run_compressed` as in `load`.
        """
        one_of = self.load_compressed if run_compressed else self.load_one
        self.check_whole()
        tied = self.tied()
        held: dict[str, Tensor] = {}
        homes = set(tied.values())

        def one(name: str) -> Tensor:
            return one_of(name, workers.each).to(device)

        with Workers(threads) as workers:
            names = [name for name in self if name not in tied]
            results = workers.in_order(one, names, self.stored_bytes)
            for name, x in zip(names, results, strict=True):
                if name in homes:
                    held[name] = x
                yield name, x
        yield from ((name, held[home]) for name, home in tied.items())

    def load_one(self, name: str, each: Each) -> Tensor:
        """Read and decode one tensor, dividing the work by `each`."""
        return self._told(name, lambda member: member.load(each))

    def has_rows(self, name: str) -> bool:
        """Tell whether some rows of a tensor can be read without all of it."""
        member = self._find(name)
        return isinstance(member, PlainMember) and member.has_rows

    def load_rows(self, name: str, begin: int, end: int) -> Tensor:
        """Read some rows of a tensor that has them."""
        member = self._find(name)
        assert isinstance(member, PlainMember), name
        return member.load_rows(begin, end)

    def encoded(self, name: str, each: Each) -> Encoded | None:
        """Return a tensor in the form in which it is stored, not decoded; none if it is plain."""

        def read(member: Member) -> Encoded | None:
            return member.encoded(each) if isinstance(member, BlobMember) else None

        return self._told(name, read)

    def packed(self, name: str) -> PackedTensor | None:
        """Return a tensor as it is stored, to be written again; none if it is not one blob."""
        member = self._find(name)
        return member.packed(name) if isinstance(member, BlobMember) else None

    def load_compressed(self, name: str, each: Each) -> Tensor:
        """Return a tensor that stays compressed if it is a matrix stored that way, else decode it.

        Its parts are not copied: they lie in the pages of the file, checked once, here.
        """

        def ask(member: Member) -> Tensor:
            if isinstance(member, BlobMember):
                compressed = _find_runtime()(member.encoded(each), each)
                if compressed is not None:
                    member.file.release(member.entry)  # mapped parts are read again on use
                    return compressed
            return member.load(each)

        return self._told(name, ask)

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
            raise ValueError(f"{self.path}: the archive is closed")
        if name not in self._members:
            raise KeyError(f"{self.path} holds no tensor named {name!r}")
        return self._members[name]

    def _told(self, name: str, ask: Callable[[Member], Answer]) -> Answer:
        member = self._find(name)
        try:
            return ask(member)
        except FormatError as error:
            raise type(error)(f"{member.file.name}: {name}: {error}") from error


def open(path: StrPath, *, storage_options: dict[str, Any] | None = None) -> Archive:
    """Open a file, a folder, an index or a URL, reading nothing but headers."""
    return Archive(path, storage_options=storage_options)


def load(
    path: StrPath,
    *,
    device: torch.device | str = "cpu",
    threads: int | None = None,
    run_compressed: bool = False,
    storage_options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Read all that a file or folder holds. Any safetensors file will do, compressed or not.

    A state that was not all tensors comes back as it was, with its tuples, numbers and dtypes.

    Tensors come back dense, unless `run_compressed`: then matrices that our dialect stores
    quantized or sparse stay so (`slimtensors.tensors`), in the pages of the file, which must not
    change.
    """
    with open(path, storage_options=storage_options) as archive:
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
        raise CorruptFileError(f"{archive.path}: holds a {type(state).__name__}, not a table")
    return state


def inspect(path: StrPath, *, storage_options: dict[str, Any] | None = None) -> Summary:
    """Tell how every tensor of a file or folder is stored, without decoding it."""
    with open(path, storage_options=storage_options) as archive:
        return archive.summary()
