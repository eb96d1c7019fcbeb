"""Load through `torch.distributed.checkpoint`, with any number of ranks."""

import io
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader as TorchStorageReader
from torch.futures import Future

from slimtensors.archive.summary import TensorSummary
from slimtensors.archive.tree import unflatten
from slimtensors.checkpoint.distributed.manifest import (
    StoredChunk,
    read_distributed_manifest,
    to_metadata,
)
from slimtensors.checkpoint.distributed.pending import (
    check_path,
    create_run_id,
    is_torch_checkpoint,
)
from slimtensors.checkpoint.distributed.pieces import (
    Box,
    count_pieces,
    format_piece_name,
    parse_piece_name,
    parse_rank_outline,
    split_box,
)
from slimtensors.checkpoint.documents import check_chain
from slimtensors.checkpoint.tensor_entry import TensorFile
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, MismatchError
from slimtensors.parallel import Each, Workers, serially
from slimtensors.storage import (
    Folder,
    StrPath,
    file_size,
    is_distributed,
    locate_folder,
    parent_of,
)
from slimtensors.tensor import Spec, allocate, copy_into


class StorageReader(TorchStorageReader):
    """A storage reader for `dcp.load`, for any number of ranks and any layout.

    Each rank decodes the pieces that it needs, each of them once. A delta needs its base, by
    default the folder of that name next to it. The path may be an fsspec URL: ranks read only the
    ranges they need. `storage_options` are passed to fsspec.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> from slimtensors.distributed import StorageWriter
        >>> state = {"model": {"weight": torch.ones(2, 2)}}
        >>> _ = dcp.save(state, storage_writer=StorageWriter("first"), no_dist=True)
        >>> dcp.load(state, storage_reader=StorageReader("first"), no_dist=True)
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        base: StrPath | None = None,
        threads: int | None = None,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = None if path is None else check_path(path)
        self._storage_options = storage_options
        self.load_id = create_run_id()
        """Id of the load."""
        self._base, self._threads = base, threads
        self._stored: StoredShards | None = None

    @property
    def decoded_bytes(self) -> int:
        """Bytes that this rank decoded in the last load: the cost of a change of layout."""
        return self._stored.decoded_bytes if self._stored else 0

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Prepare to read another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = check_path(checkpoint_id)
        self.load_id = create_run_id()
        self._stored = None

    def read_metadata(self) -> Metadata:
        """Open the checkpoint and return its metadata."""
        if self.checkpoint_id is None:
            raise ConfigError("no checkpoint given; pass StorageReader(path) or checkpoint_id=")
        folder = locate_folder(self.checkpoint_id, self._storage_options)
        if not is_distributed(folder) and is_torch_checkpoint(folder):
            raise FormatError(
                f"{self.checkpoint_id} is a checkpoint of FileSystemWriter; use FileSystemReader"
            )
        base = None
        if self._base is not None:
            base = locate_folder(self._base, self._storage_options)
        self._stored = StoredShards(folder, base=base)
        metadata = to_metadata(self._stored.manifest)
        metadata.storage_meta = StorageMeta(
            checkpoint_id=self.checkpoint_id,
            save_id=self._stored.manifest.run,
            load_id=self.load_id,
        )
        return metadata

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check the files of the checkpoint, on the coordinator only."""
        if is_coordinator:
            self._require_stored().check_files()

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Decode the items of this rank into the tensors of the planner."""
        stored = self._require_stored()
        reads: dict[tuple[str, Box], _PieceRead] = {}
        tensors: list[tuple[ReadItem, Tensor]] = []
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, _pack_object(stored.load_object(name)))
                continue
            target = planner.resolve_tensor(item).detach()
            if target.shape != item.lengths:
                shapes = f"expected shape {tuple(item.lengths)}, got {tuple(target.shape)}"
                raise MismatchError(f"{name}: {shapes}")
            _add_reads(reads, stored, item, target)
            tensors.append((item, target))
        with Workers(self._threads) as workers:

            def decode(read: _PieceRead) -> None:
                x = stored.load_piece(read.tensor, read.piece, read.file, workers.each)
                for box, target in read.targets:
                    part = box.intersect(read.piece)
                    assert part is not None
                    copy_into(part.narrow(target, box), part.narrow(x, read.piece))

            deque(workers.in_order(decode, reads.values(), lambda read: read.bytes), maxlen=0)
        for item, target in tensors:
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True: any path or URL is valid until it is opened."""
        return True

    def _require_stored(self) -> "StoredShards":
        assert self._stored is not None, "read_metadata must be called first"
        return self._stored


@dataclass(frozen=True)
class _PieceRead:
    """A piece to decode, and the tensors to copy parts of it into."""

    tensor: str
    piece: Box
    file: int
    bytes: int
    targets: list[tuple[Box, Tensor]] = field(default_factory=list)


def _add_reads(
    reads: dict[tuple[str, Box], _PieceRead], stored: "StoredShards", item: ReadItem, target: Tensor
) -> None:
    """Add the pieces that an item needs; items may share pieces."""
    name, offset = item.storage_index.fqn, tuple(item.storage_index.offset or ())
    chunk = stored.find_chunk(name, offset, item.storage_index.index)
    start = tuple(map(sum, zip(offset, item.storage_offsets, strict=True)))
    box = Box(start, tuple(item.lengths))
    if not box.numel:
        return
    for piece in stored.split_chunk(name, chunk, box):
        size = piece.numel * stored.manifest.tensors[name].spec.dtype.itemsize
        read = reads.setdefault((name, piece), _PieceRead(name, piece, chunk.file, size))
        read.targets.append((box, target))


def _pack_object(value: Any) -> io.BytesIO:
    """Return a value in the serialized form that planners expect; nothing is read from disk."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return buffer


_CACHE_BYTES = 16 << 20
"""Size of the cache of decoded pieces."""


class StoredShards:
    """A distributed checkpoint on disk; parts of tensors are decoded on demand."""

    def __init__(
        self, folder: Folder, *, base: Folder | None = None, deltas: Sequence[Folder] = ()
    ) -> None:
        """Open a checkpoint and its bases; `deltas` are those that need it, the nearest last."""
        self.folder = folder
        self.manifest = read_distributed_manifest(folder)
        check_chain(folder, deltas)
        self._base = self._open_base(base, deltas)
        self._file_names = list(self.manifest.files)
        self._files: dict[int, _RankFile] = {}
        self._cache: OrderedDict[str, Tensor] = OrderedDict()
        self._lock = threading.Lock()
        self._decoded_bytes = 0

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all pieces decoded so far, including those of bases."""
        return self._decoded_bytes + (self._base.decoded_bytes if self._base else 0)

    def check_files(self) -> None:
        """Raise unless the folder contains the files of this checkpoint; others are ignored."""
        files = self.manifest.files
        for name, size in files.items():
            path = self.folder / name
            if not path.is_file():
                raise CorruptFileError(f"{path} not found; the checkpoint is incomplete")
            if (actual := file_size(path)) != size:
                raise CorruptFileError(f"{path}: expected {size} bytes, got {actual}")
        if self._base is not None:
            self._base.check_files()

    def find_chunk(self, name: str, offset: tuple[int, ...], hint: int | None) -> StoredChunk:
        """Return the chunk of a tensor at an offset; `hint` is its probable index."""
        chunks = self.manifest.tensors[name].chunks
        if hint is not None and hint < len(chunks) and chunks[hint].box.offset == offset:
            return chunks[hint]
        found = next((chunk for chunk in chunks if chunk.box.offset == offset), None)
        if found is None:
            raise CorruptFileError(f"{self.folder}: {name}: no chunk at {offset}")
        return found

    def split_chunk(self, name: str, chunk: StoredChunk, part: Box) -> Iterator[Box]:
        """Yield the pieces of a chunk that intersect `part`."""
        dtype, limit = self.manifest.tensors[name].spec.dtype, self.manifest.piece_bytes
        file = self._open_file(chunk.file)
        if (count := count_pieces(chunk.box, dtype, limit)) > len(file) + len(file.tied):
            raise CorruptFileError(f"{file.archive.path}: {name}: {count} pieces expected")
        return split_box(chunk.box, dtype, limit, part)

    def load_region(self, name: str, box: Box, each: Each = serially) -> Tensor:
        """Return a part of a tensor; decode only the pieces that intersect it."""
        tensor = self.manifest.tensors[name]
        out: Tensor | None = None
        for chunk in tensor.chunks:
            common = chunk.box.intersect(box)
            if common is None:
                continue
            for piece in self.split_chunk(name, chunk, common):
                x = self._load_cached(name, piece, chunk.file, each)
                if piece == box:
                    return x
                if out is None:
                    out = allocate(Spec(tensor.spec.dtype, box.shape))
                part = piece.intersect(common)
                assert part is not None
                copy_into(part.narrow(out, box), part.narrow(x, piece))
        return out if out is not None else allocate(Spec(tensor.spec.dtype, box.shape))

    def load_piece(self, name: str, box: Box, file: int, each: Each) -> Tensor:
        """Read, verify and decode a piece."""
        expected = Spec(self.manifest.tensors[name].spec.dtype, box.shape)
        x = self._open_file(file).load(format_piece_name(name, box), each)
        if Spec.of(x) != expected:
            piece = f"{self.folder / self._file_names[file]}: {format_piece_name(name, box)}"
            raise CorruptFileError(f"{piece}: expected {expected}, got {Spec.of(x)}")
        with self._lock:
            self._decoded_bytes += x.nbytes
        return x

    def load_object(self, name: str) -> Any:
        """Return a value that is not a tensor."""
        return self._open_file(self.manifest.objects[name].file).load_object(name)

    def iter_summaries(self) -> Iterator[TensorSummary]:
        """Yield a summary of each piece, and of each tensor inside an object."""
        for index in range(len(self._file_names)):
            yield from self._open_file(index).archive.summary().tensors

    def _load_cached(self, name: str, box: Box, file: int, each: Each) -> Tensor:
        key = format_piece_name(name, box)
        with self._lock:
            if key in self._cache:
                self._cache.move_to_end(key)
                return self._cache[key]
        x = self.load_piece(name, box, file, each)
        with self._lock:
            self._cache[key] = x
            while len(self._cache) > 1 and self._cached_bytes() > _CACHE_BYTES:
                self._cache.popitem(last=False)
        return x

    def _cached_bytes(self) -> int:
        return sum(x.nbytes for x in self._cache.values())

    def _open_file(self, index: int) -> "_RankFile":
        with self._lock:
            if index not in self._files:
                path = self.folder / self._file_names[index]
                self._files[index] = _RankFile(path, self.manifest.run, self._base)
            return self._files[index]

    def _open_base(self, path: Folder | None, deltas: Sequence[Folder]) -> "StoredShards | None":
        base = self.manifest.base
        if base is None:
            if path is not None:
                raise ConfigError(f"{self.folder} needs no base, but base={path} was passed")
            return None
        folder = path or parent_of(self.folder) / base.name
        delta = f"{self.folder} is a delta of {base.name} (run {base.run})"
        if not is_distributed(folder):
            raise MismatchError(f"{delta}, which was not found at {folder}; pass base=")
        opened = StoredShards(folder, deltas=[*deltas, self.folder])
        if opened.manifest.run != base.run:
            raise MismatchError(
                f"{delta}, but the checkpoint at {folder} is run {opened.manifest.run}"
            )
        return opened


class _RankFile(TensorFile):
    """The file of one rank. It has no reference to its checkpoint, so that both close together."""

    def __init__(self, path: Folder, run: str, base: StoredShards | None) -> None:
        if not path.is_file():
            raise CorruptFileError(f"{path} not found; the checkpoint is incomplete")

        def load_base(name: str, like: Spec, each: Each) -> Tensor | None:
            tensor, offset = parse_piece_name(name)
            box = Box(offset, like.shape)
            stored = base.manifest.tensors.get(tensor) if base else None
            if base is None or stored is None or not box.is_inside(stored.spec.shape):
                return None
            return base.load_region(tensor, box, each)

        super().__init__(path, load_base)
        outline = parse_rank_outline(self.archive.tree, path)
        self._objects = outline.objects
        if outline.run != run:
            raise MismatchError(f"{path} is part of run {outline.run}, expected {run}")

    def load_object(self, name: str) -> Any:
        """Return a value that is not a tensor."""
        if name not in self._objects:
            raise CorruptFileError(f"{self.archive.path}: {name} not found")
        try:
            return unflatten(self._objects[name], self)
        except FormatError as error:
            raise type(error)(f"{self.archive.path}: {name}: {error}") from error
