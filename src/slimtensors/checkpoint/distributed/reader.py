"""Load through `torch.distributed.checkpoint`, for any number of ranks."""

import io
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as Reader
from torch.futures import Future

from slimtensors.archive import Archive
from slimtensors.archive.delta import tensor_digest
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.tree import unflatten
from slimtensors.checkpoint.coding import NEEDS_BASE, NEEDS_SIBLING, SAME, decode_entry
from slimtensors.checkpoint.distributed.manifest import (
    Box,
    StoredChunk,
    is_distributed,
    read_manifest,
    split_box,
)
from slimtensors.checkpoint.distributed.pieces import (
    piece_name,
    piece_place,
    rank_tree,
    to_metadata,
)
from slimtensors.checkpoint.store import stored_entries
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, MismatchError
from slimtensors.parallel import Each, Workers, serially
from slimtensors.storage import StrPath, local_path
from slimtensors.tensor import Spec, allocate, copy_into

_CACHED = 16 << 20
"""Bytes of decoded pieces that are kept for whoever needs more of them."""


class StoredShards:
    """A distributed checkpoint on disk: names at once, parts of tensors when asked for."""

    def __init__(self, folder: Path, *, base: Path | None = None) -> None:
        self.folder = folder
        self.manifest = read_manifest(folder)
        self._base = self._opened_base(base)
        self._names = list(self.manifest.files)
        self._files: dict[int, _RankFile] = {}
        self._cache: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._decoded = 0

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all pieces that have been decoded, those of bases too."""
        return self._decoded + (self._base.decoded_bytes if self._base else 0)

    def check_files(self) -> None:
        """Raise unless the folder holds the files of this checkpoint, and of no other one."""
        files = self.manifest.files
        for name, size in files.items():
            path = self.folder / name
            if not path.is_file():
                raise CorruptFileError(f"{path}: is missing; the checkpoint is not complete")
            if (have := path.stat().st_size) != size:
                raise CorruptFileError(f"{path}: has {have} bytes, {size} were written")
        for path in sorted(self.folder.glob("*.safetensors")):
            if path.name not in files:
                raise FormatError(
                    f"{path}: belongs to another checkpoint than {self.manifest.run}; remove it"
                )
        if self._base is not None:
            self._base.check_files()

    def region(self, name: str, box: Box, each: Each = serially) -> Tensor:
        """Return a part of a tensor, decoding no more pieces than it touches."""
        tensor = self.manifest.tensors[name]
        out: Tensor | None = None
        for chunk in tensor.chunks:
            common = chunk.box.overlap(box)
            if common is None:
                continue
            for piece in self.pieces(name, chunk.box, common):
                x = self._cached(name, piece, chunk.file, each)
                if piece == box:
                    return x
                if out is None:
                    out = allocate(Spec(tensor.spec.dtype, box.shape))
                part = piece.overlap(common)
                assert part is not None
                copy_into(part.of(out, box), part.of(x, piece))
        return out if out is not None else allocate(Spec(tensor.spec.dtype, box.shape))

    def chunk(self, name: str, at: tuple[int, ...], hint: int | None) -> StoredChunk:
        """Return the chunk of a tensor that begins there; `hint` is its number, or a guess."""
        chunks = self.manifest.tensors[name].chunks
        if hint is not None and hint < len(chunks) and chunks[hint].box.at == at:
            return chunks[hint]
        found = next((chunk for chunk in chunks if chunk.box.at == at), None)
        if found is None:
            raise CorruptFileError(f"{self.folder}: {name}: has no chunk at {at}")
        return found

    def pieces(self, name: str, chunk: Box, part: Box) -> Iterator[Box]:
        """Yield the pieces of a chunk that hold a part of it."""
        return split_box(
            chunk, self.manifest.tensors[name].spec.dtype, self.manifest.piece_bytes, part
        )

    def piece(self, name: str, box: Box, file: int, each: Each) -> Tensor:
        """Read, check and decode a piece."""
        spec = self.manifest.tensors[name].spec
        x = self._file(file).load(piece_name(name, box), each)
        if Spec.of(x) != Spec(spec.dtype, box.shape):
            where = f"{self.folder / self._names[file]}: {piece_name(name, box)}"
            raise CorruptFileError(f"{where}: is not the piece that the manifest describes")
        with self._lock:
            self._decoded += x.nbytes
        return x

    def summaries(self) -> Iterator[TensorSummary]:
        """Yield how each piece, and each tensor of an object, is stored."""
        for number in range(len(self._names)):
            yield from self._file(number).summary().tensors

    def value(self, name: str) -> Any:
        """Return what is no tensor."""
        return self._file(self.manifest.objects[name].file).value(name)

    def _cached(self, name: str, box: Box, file: int, each: Each) -> Tensor:
        key = piece_name(name, box)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        x = self.piece(name, box, file, each)
        with self._lock:
            self._cache[key] = x
            while len(self._cache) > 1 and sum(y.nbytes for y in self._cache.values()) > _CACHED:
                self._cache.popitem(last=False)
        return x

    def _file(self, number: int) -> "_RankFile":
        with self._lock:
            if number not in self._files:
                path = self.folder / self._names[number]
                self._files[number] = _RankFile(path, self.manifest.run, self._base)
            return self._files[number]

    def _opened_base(self, given: Path | None) -> "StoredShards | None":
        base = self.manifest.base
        if base is None:
            return None
        home = given or self.folder.parent / base.name
        if home.resolve() == self.folder.resolve():
            raise CorruptFileError(f"{self.folder}: says that it is a difference from itself")
        needs = f"{self.folder}: is a difference from {base.name} (run {base.run})"
        if not is_distributed(home):
            raise MismatchError(f"{needs}, which is not at {home}; bring it back, or pass base=...")
        opened = StoredShards(home)
        if opened.manifest.run != base.run:
            raise MismatchError(f"{needs}; the one at {home} is run {opened.manifest.run}")
        return opened


class _RankFile:
    """The file of one rank; it knows nothing of its checkpoint, so that both close together."""

    def __init__(self, path: Path, run: str, base: StoredShards | None) -> None:
        if not path.is_file():
            raise CorruptFileError(f"{path}: is missing; the checkpoint is not complete")
        self._archive, self._base = Archive(path), base
        self._entries, self._tied = stored_entries(self._archive)
        tree = rank_tree(self._archive.tree, path)
        self._objects = tree.objects
        if tree.run != run:
            raise MismatchError(f"{path}: was written by run {tree.run}, its folder is of {run}")

    def load(self, name: str, each: Each) -> Tensor:
        """Read and decode a piece."""
        name = self._tied.get(name, name)
        if not self._entries:
            self._check_has(name, self._archive)
            return self._archive.load_one(name, each)
        self._check_has(name, self._entries)
        entry = self._entries[name]
        other = None
        if entry.kind in NEEDS_SIBLING:
            assert entry.by is not None
            other = self.load(entry.by, each)
        elif entry.kind in NEEDS_BASE:
            other = self._base_piece(name, entry.like.shape, each)
            if tensor_digest(other) != entry.base:
                raise MismatchError(
                    f"{self._archive.path}: {name}: the base is not what it was made from"
                )
        r = None if entry.kind == SAME else self._archive.load_one(name, each)
        try:
            return decode_entry(entry, r, other, each)
        except CorruptFileError as error:
            raise CorruptFileError(f"{self._archive.path}: {name}: {error}") from error

    def summary(self) -> Summary:
        """Return how everything in it is stored."""
        return self._archive.summary()

    def value(self, name: str) -> Any:
        """Return what is no tensor."""
        if name not in self._objects:
            raise CorruptFileError(f"{self._archive.path}: {name}: is missing")
        try:
            return unflatten(self._objects[name], _Loaded(self))
        except FormatError as error:
            raise type(error)(f"{self._archive.path}: {name}: {error}") from error

    def _base_piece(self, name: str, shape: tuple[int, ...], each: Each) -> Tensor:
        """Return the part of the base that a piece was made from."""
        tensor, at = piece_place(name)
        box = Box(at, shape)
        tensors = self._base.manifest.tensors if self._base else {}
        if self._base is None or tensor not in tensors or not box.is_in(tensors[tensor].spec.shape):
            raise CorruptFileError(f"{self._archive.path}: {name}: its base has no such tensor")
        return self._base.region(tensor, box, each)

    def _check_has(self, name: str, held: Mapping[str, Any] | Archive) -> None:
        if name not in held:
            raise CorruptFileError(f"{self._archive.path}: {name}: is missing")


class _Loaded(Mapping[str, Tensor]):
    """The tensors of a file, each read when it is asked for."""

    def __init__(self, file: _RankFile) -> None:
        self._file = file

    def __getitem__(self, name: str) -> Tensor:
        return self._file.load(name, serially)

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0


@dataclass(frozen=True)
class _Job:
    """A piece to decode, and the parts of it that are wanted somewhere."""

    tensor: str
    piece: Box
    file: int
    bytes: int
    targets: list[tuple[Box, Tensor]] = field(default_factory=list)


class StorageReader(Reader):
    """A storage reader for `dcp.load`, into any number of ranks and any layout.

    A rank decodes the pieces that it needs, each once. A delta needs its base, by default the
    folder of that name beside it.
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        base: StrPath | None = None,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = None if path is None else local_path(path)
        self._base, self._threads = base, threads
        self._stored: StoredShards | None = None

    @property
    def decoded_bytes(self) -> int:
        """Bytes that this rank decoded in the last load, to see what another layout costs."""
        return self._stored.decoded_bytes if self._stored else 0

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin to read another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = local_path(checkpoint_id)
        self._stored = None

    def read_metadata(self) -> Metadata:
        """Read what the checkpoint holds."""
        if self.checkpoint_id is None:
            raise ConfigError("which one? Give StorageReader a path, or dcp.load a checkpoint_id")
        base = local_path(self._base) if self._base is not None else None
        self._stored = StoredShards(self.checkpoint_id, base=base)
        metadata = to_metadata(self._stored.manifest)
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id)
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check, on one rank for all, that every file is there and no other."""
        if is_coordinator:
            self._opened().check_files()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan: there is nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans: there is nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode what this rank needs, straight to where it belongs."""
        stored = self._opened()
        jobs: dict[tuple[str, Box], _Job] = {}
        tensors: list[tuple[ReadItem, Tensor]] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _saved(stored.value(item.storage_index.fqn)))
                continue
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                shapes = f"{tuple(item.lengths)} to read, {tuple(target.shape)} to fill"
                raise MismatchError(f"{item.storage_index.fqn}: {shapes}")
            _add_jobs(jobs, stored, item, target)
            tensors.append((item, target))
        with Workers(self._threads) as workers:

            def one(job: _Job) -> None:
                x = stored.piece(job.tensor, job.piece, job.file, workers.each)
                for box, target in job.targets:
                    part = box.overlap(job.piece)
                    assert part is not None
                    copy_into(part.of(target, box), part.of(x, job.piece))

            deque(workers.in_order(one, jobs.values(), lambda job: job.bytes), maxlen=0)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Tell whether this can be a place of checkpoints: a local path."""
        return "://" not in str(checkpoint_id)

    def _opened(self) -> StoredShards:
        assert self._stored is not None, "read_metadata comes first"
        return self._stored


def _add_jobs(
    jobs: dict[tuple[str, Box], _Job], stored: StoredShards, item: ReadItem, target: Tensor
) -> None:
    """Add the pieces that an item needs to those that others need."""
    name, at = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    chunk = stored.chunk(name, at, item.storage_index.index)
    begin = tuple(map(sum, zip(at, item.storage_offsets, strict=True)))
    wanted = Box(begin, tuple(item.lengths))
    if not wanted.numel:
        return
    for piece in stored.pieces(name, chunk.box, wanted):
        size = piece.numel * stored.manifest.tensors[name].spec.dtype.itemsize
        job = jobs.setdefault((name, piece), _Job(name, piece, chunk.file, size))
        job.targets.append((wanted, target))


def _saved(value: Any) -> io.BytesIO:
    """Return a value in the form in which planners take it: made here, in memory, from JSON."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer
