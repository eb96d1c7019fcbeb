"""Decode the stream of tensors that vLLM reads from files. Needs no vLLM."""

import ctypes
import mmap
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils._pytree import tree_map_only

from slimtensors.archive import Archive
from slimtensors.archive.dialects import BlobMember, PlainMember
from slimtensors.archive.dialects.compressed_tensors import (
    REQUIRED,
    SUFFIXES,
    SparseMember,
    find_tensor_name,
    join,
)
from slimtensors.archive.dialects.entries import StoredEntry, checksum
from slimtensors.archive.dialects.slim import is_blob, parse_blob, parse_header
from slimtensors.archive.read import open_archive
from slimtensors.codecs import Bins, Huffman, Trellis
from slimtensors.codecs.plan import Encoded, decode, decode_into, decode_parts, rebuild
from slimtensors.codecs.protocol import has_random_access
from slimtensors.errors import CorruptFileError, FormatError, SlimError
from slimtensors.parallel import Each, Workers, count_cores, serially
from slimtensors.storage import StrPath
from slimtensors.tensor import Spec, allocate, as_bytes, concatenate, parse_shape

T = TypeVar("T")

_SELF_CHECKING = (Bins, Huffman, Trellis)
"""Codecs that compare a checksum of each chunk; that of the whole blob is not needed."""

_PIECE_ITEMS = 8 << 20
"""Items that a thread decodes at a time: many chunks of every codec."""
_MIN_POOLED, _MAX_POOLED = 1 << 20, 64 << 20
"""Bytes of tensors whose memory is used again; larger ones are rare."""


def decode_weights(
    weights: Iterable[tuple[str, Tensor]],
    folder: "Folder",
    *,
    sparse: bool = False,
    partial: bool = False,
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a stream, in its order, with compressed tensors decoded.

    Those of a delta come first, in the order of its model. The next tensors are decoded on other
    threads while the caller uses one.

    Args:
        weights: names and stored tensors, as vLLM reads them from files.
        folder: the folder that contains the files.
        sparse: whether to join the parts of sparse tensors, which may be in different files.
        partial: whether the caller uses only some tensors or rows of them, as one of several
            ranks; what it does not use is not decoded.
    """
    stored = (StoredTensor(name, {"": x}) for name, x in folder.explain_errors(weights))
    stream = join_parts(stored) if sparse else stored
    passed: list[str] = []
    for first in stream:
        if first.is_compressed or folder.is_damaged(first):
            stream = chain([first], stream)
            break
        passed.append(first.name)
        yield first.name, first.parts[""]  # at once: files of others are read as without us
    else:
        if passed:  # a delta without changes contains no tensors
            return
    folder.open()
    stream = folder.expand_delta(stream)
    pages, buffers = MappedPages(), BufferPool()
    with Workers(_count_threads()) as workers:
        folder.check_plain(passed, workers.each)
        if partial:
            yield from _defer(stream, folder, pages, workers)
            return

        def load(item: StoredTensor) -> tuple[str, Tensor]:
            with folder.name_errors(item.name):
                folder.check_parts(item, workers.each)
                x = item.decode(workers.each, buffers)
            if item.is_compressed:
                pages.release(item.parts.values())
            return item.name, x

        yield from workers.in_order(load, stream, lambda item: item.decoded_bytes)
        yield from folder.load_copies(workers.each)


def _defer(
    stream: Iterable["StoredTensor"], folder: "Folder", pages: "MappedPages", workers: Workers
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a stream, which are decoded when they are used."""
    is_open = True

    def each(work: Callable[[int], T], count: int, /) -> list[T]:
        return workers.each(work, count) if is_open else serially(work, count)

    try:
        for item in stream:
            with folder.name_errors(item.name):
                folder.check_parts(item, each)
                x = DeferredTensor(item, folder, each) if item.is_compressed else item.decode(each)
            yield item.name, x
            if item.is_compressed:
                pages.release(item.parts.values())
        yield from folder.load_copies(each)
    finally:
        is_open = False  # tensors that the caller still has may be used later


class DeferredTensor(Tensor):
    """A compressed tensor that is decoded when it is used, and only the rows that are.

    Every operator works on the dense tensor, which is decoded once.
    """

    def __new__(cls, item: "StoredTensor", folder: "Folder", each: Each) -> Self:
        """Wrap a stored tensor."""
        spec = item.decoded_spec
        return cls._make_wrapper_subclass(cls, spec.shape, dtype=spec.dtype)

    def __init__(self, item: "StoredTensor", folder: "Folder", each: Each) -> None:
        self._item, self._folder, self._each = item, folder, each

    @cached_property
    def _dense(self) -> Tensor:
        with self._folder.name_errors(self._item.name):
            return self._item.decode(self._each)

    def _take_rows(self, begin: int, end: int) -> Tensor:
        if "_dense" in self.__dict__ or end - begin == self.shape[0]:
            return self._dense[begin:end]
        with self._folder.name_errors(self._item.name):
            rows = self._item.decode_rows(begin, end, self._each)
        return self._dense[begin:end] if rows is None else rows

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Decode the rows that a slice selects, or all tensors that an operator uses."""
        if isinstance(args[0], cls) and (rows := _find_rows(func, *args)) is not None:
            return (
                args[0]._take_rows(*rows) if func is not _SELECT else args[0]._take_rows(*rows)[0]
            )
        dense = tree_map_only(cls, lambda x: x._dense, (args, kwargs or {}))
        return func(*dense[0], **dense[1])


_SLICE, _SELECT = torch.ops.aten.slice.Tensor, torch.ops.aten.select.int
_NARROW = torch.ops.aten.narrow.default  # a slice, except in inference mode


def _find_rows(func: object, x: Tensor, *args: Any) -> tuple[int, int] | None:
    """Return the rows that an operator selects; None if it does anything else."""
    if not args or args[0] != 0:
        return None
    if func is _SELECT:
        row = range(x.shape[0])[args[1]]
        return row, row + 1
    if func is _NARROW:
        return args[1], args[1] + args[2]
    if func is _SLICE:
        begin, end, step = slice(*[*args[1:], None, None][:3]).indices(x.shape[0])
        return (begin, end) if step == 1 and begin < end else None
    return None


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as it is stored: plain, a blob, or sparse in several parts."""

    name: str
    parts: Mapping[str, Tensor]
    """By suffix; a tensor stored in one piece has the suffix ''."""

    @cached_property
    def is_compressed(self) -> bool:
        """Whether it must be decoded."""
        return "" not in self.parts or self._is_blob

    @cached_property
    def decoded_spec(self) -> Spec:
        """Dtype and shape of the decoded tensor."""
        if "" not in self.parts:
            shape = parse_shape(self.parts["shape"].flatten().tolist())
            return Spec(self.parts["compressed"].dtype, shape)
        if self._is_blob:
            return Spec.from_json(parse_header(self._raw)[1])
        return Spec.of(self.parts[""])

    @property
    def decoded_bytes(self) -> int:
        """Bytes to allocate for decoding; 0 if plain."""
        return self.decoded_spec.nbytes if self.is_compressed else 0

    def decode(self, each: Each, buffers: "BufferPool | None" = None) -> Tensor:
        """Return the tensor itself, in memory of `buffers` if possible."""
        if "" not in self.parts:
            values, mask = self.parts["compressed"], self.parts["bitmask"]
            return join(values.cpu(), mask.cpu(), self.decoded_spec.shape, each).to(values.device)
        x = self.parts[""]
        if not self._is_blob:
            return x
        if (encoded := self._self_checking) is None:
            return decode(parse_blob(self._raw, each), each).to(x.device)
        out = allocate(encoded.spec) if buffers is None else buffers.take(encoded.spec)
        return decode_into(encoded, out, each).to(x.device)

    def decode_rows(self, begin: int, end: int, each: Each) -> Tensor | None:
        """Return some rows without reading the others; None if the codec cannot do that."""
        if "" not in self.parts or (encoded := self._self_checking) is None:
            return None
        codec, spec = encoded.codec, encoded.spec
        assert has_random_access(codec), codec.name
        if isinstance(codec, Trellis) and codec.transposed:
            return None
        shape = (end - begin, *spec.shape[1:])
        width, parts = spec.numel // spec.shape[0], decode_parts(encoded, each)
        bounds = [*range(begin * width, end * width, _PIECE_ITEMS), end * width]
        pieces = each(
            lambda i: codec.decode_range(parts, spec, bounds[i], bounds[i + 1]), len(bounds) - 1
        )
        flat = concatenate([as_bytes(x) for x in pieces]) if len(pieces) > 1 else pieces[0]
        return flat.view(spec.dtype).view(shape)

    @property
    def _self_checking(self) -> Encoded | None:
        """The parts of the blob, if its chunks have checksums of their own; else None."""
        start, header = parse_header(self._raw)
        encoded = rebuild(header, self._raw[start:])
        is_plain = not any(isinstance(part, Encoded) for part in encoded.parts.values())
        return encoded if is_plain and isinstance(encoded.codec, _SELF_CHECKING) else None

    @cached_property
    def _is_blob(self) -> bool:
        return is_blob(Spec.of(self.parts[""]), lambda size: self._raw[:size])

    @cached_property
    def _raw(self) -> memoryview:
        return self.parts[""].cpu().contiguous().numpy().data


@dataclass(frozen=True)
class DeltaTensor(StoredTensor):
    """A tensor of a delta, which is decoded with its base."""

    archive: Archive

    is_compressed = True

    @cached_property
    def decoded_spec(self) -> Spec:
        """Dtype and shape of the tensor."""
        return self.archive.spec(self.name)

    def decode(self, each: Each, buffers: "BufferPool | None" = None) -> Tensor:
        """Return the tensor, in memory of its own."""
        return self.archive.load_one(self.name, each)

    def decode_rows(self, begin: int, end: int, each: Each) -> None:
        """Return None: the digest of the base covers whole tensors."""


def join_parts(stream: Iterable[StoredTensor]) -> Iterator[StoredTensor]:
    """Yield the tensors of a stream, with the parts of each sparse tensor joined.

    Parts that wait for others are views of mapped files, so they take no memory. A tensor is
    yielded when its last required part arrives.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for item in stream:
        prefix, _, suffix = item.name.rpartition(".")
        if suffix not in SUFFIXES:
            yield item
            continue
        parts = waiting.setdefault(prefix, {})
        parts[suffix] = item.parts[""]
        if suffix in REQUIRED and parts.keys() >= set(REQUIRED):
            yield StoredTensor(find_tensor_name(prefix), waiting.pop(prefix))
    for prefix, parts in waiting.items():
        if parts.keys() != {"row_offsets"}:  # not needed for decoding
            missing = ", ".join(
                f"{prefix}.{suffix}" for suffix in sorted(set(REQUIRED) - parts.keys())
            )
            raise FormatError(f"{find_tensor_name(prefix)}: parts not found: {missing}")


@dataclass
class Folder:
    """The folder of a model, opened only if it contains compressed tensors or an error occurs."""

    name: str
    """Path, or name on a hub."""
    find_path: Callable[[], StrPath | None]
    """Returns the local path, or None if there is none."""
    base: StrPath | None = None
    """The base of a delta; None to search for it."""
    archive: Archive | None = None

    def open(self) -> None:
        """Open all files and check their headers, unless none are found under a usual name.

        Raises if this is a delta whose base is not found.
        """
        if self.archive is None and (path := self.find_path()) is not None:
            try:
                self.archive = open_archive(path, base=self.base)
            except FileNotFoundError as error:
                if isinstance(error, SlimError):
                    raise

    def expand_delta(self, stream: Iterator[StoredTensor]) -> Iterator[StoredTensor]:
        """Return the stream with the tensors of the model in place of the residuals of a delta."""
        archive = self.archive
        if archive is None or (residuals := archive.residuals) is None:
            return stream
        tied = archive.tied()
        tensors = (DeltaTensor(name, {}, archive) for name in archive if name not in tied)
        return chain(tensors, (item for item in stream if item.name not in residuals))

    def is_damaged(self, item: StoredTensor) -> bool:
        """Return True if a plain tensor is listed as a blob."""
        x = item.parts[""]
        if x.dtype is not torch.uint8 or x.dim() != 1:
            return False
        try:
            self.open()
        except (SlimError, OSError):
            return False  # bytes of another library, in files that only it reads
        return self._has_blob(item.name)

    def _has_blob(self, name: str) -> bool:
        archive = self.archive
        return bool(archive and name in archive and isinstance(archive.member(name), BlobMember))

    @contextmanager
    def name_errors(self, name: str) -> Iterator[None]:
        """Add the file and the tensor to errors."""
        try:
            yield
        except SlimError as error:
            archive = self.archive
            file = archive.member(name).file.name if archive and name in archive else self.name
            raise type(error)(f"{file}: {name}: {error}") from error

    def explain_errors(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights; raise our error, which names the file, if one cannot be read."""
        try:
            yield from weights
        except SafetensorError:
            self.open()
            raise

    def check_parts(self, item: StoredTensor, each: Each) -> None:
        """Raise if an entry differs from its checksum, or is a blob no more."""
        if self.archive is None or item.name not in self.archive:
            return
        member = self.archive.member(item.name)
        if self._has_blob(item.name) and not item.is_compressed:
            raise CorruptFileError("the first bytes of the blob are damaged")
        stored: Mapping[str, StoredEntry] = {}  # of a blob, which contains its own checksum
        if isinstance(member, PlainMember):
            stored = {"": member.stored}
        elif isinstance(member, SparseMember):
            stored = member.parts
        for suffix, x in item.parts.items():
            if suffix in stored and stored[suffix].checksum is not None:
                stored[suffix].check(checksum(as_bytes(x.cpu()), each))

    def check_plain(self, names: Iterable[str], each: Each) -> None:
        """Raise if one of these plain tensors, yielded before the folder was opened, is damaged."""
        for name in names:
            member = self.archive.member(name) if self.archive and name in self.archive else None
            if isinstance(member, PlainMember):
                with self.name_errors(name):
                    member.stored.read(each)
                member.file.release(member.stored.entry)

    def load_copies(self, each: Each) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that are stored only as equal to another one."""
        archive = self.archive
        if archive is not None:
            yield from ((name, archive.load_one(name, each)) for name in archive.copies())


class BufferPool:
    """Memory for tensors that the caller drops soon, used again for the next ones.

    The first use of fresh pages may take as long as decoding into them.
    """

    def __init__(self) -> None:
        self._free: dict[int, deque[Tensor]] = {}

    def take(self, spec: Spec) -> Tensor:
        """Return an uninitialized tensor; its memory returns to the pool with its last view."""
        if not _MIN_POOLED <= spec.nbytes <= _MAX_POOLED:
            return allocate(spec)
        free = self._free.setdefault(spec.nbytes, deque())
        try:
            memory = free.pop()
        except IndexError:
            memory = as_bytes(allocate(spec))
        lent = memory.numpy().data
        weakref.finalize(lent, free.append, memory)
        return torch.frombuffer(lent, dtype=spec.dtype).view(spec.shape)


class MappedPages:
    """Pages of mapped files, released once they are not needed any more.

    They count as memory of the process, although the system could take them back.
    """

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self._is_disabled = not sys.platform.startswith("linux")

    def release(self, tensors: Iterable[Tensor]) -> None:
        """Release the pages of tensors in a mapped file, which reads them again if needed."""
        page = mmap.PAGESIZE
        for x in tensors:
            begin = -(-x.data_ptr() // page) * page
            end = (x.data_ptr() + x.nbytes) // page * page
            if x.device.type == "cpu" and begin < end and self._contains(begin, end):
                _find_madvise()(begin, end - begin, mmap.MADV_DONTNEED)

    def _contains(self, begin: int, end: int) -> bool:
        """Return True if the range belongs to a mapped file: other memory would be cleared."""
        if self._is_disabled:
            return False
        if not self._is_known(begin, end):
            self._ranges = _list_mapped_files()
            self._is_disabled = not self._is_known(begin, end)
        return not self._is_disabled

    def _is_known(self, begin: int, end: int) -> bool:
        return any(low <= begin and end <= high for low, high in self._ranges)


def _list_mapped_files() -> list[tuple[int, int]]:
    """Return the address ranges of private mappings of safetensors files."""
    found = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, access, *_, path = line.split(maxsplit=5)
        if access.endswith("p") and path.startswith("/"):
            low, high = addresses.split("-")
            found.append((int(low, 16), int(high, 16)))
    return found


@cache
def _find_madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def _count_threads() -> int:
    """Return the number of threads for this process, divided by the ranks of vLLM."""
    cores = count_cores()
    is_bound = cores < (os.cpu_count() or 1)  # vLLM gives each rank its own cores
    return cores if is_bound else max(cores // count_ranks(), 1)


def count_ranks() -> int:
    """Return the number of processes that share the model."""
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
