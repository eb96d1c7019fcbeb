"""Save through `torch.distributed.checkpoint`: one file per rank, committed together."""

import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slimtensors.archive.values import PICKLED_TYPES
from slimtensors.checkpoint.distributed.coding import (
    CodingOptions,
    RankAssignment,
    describe_tensor,
    write_rank_file,
)
from slimtensors.checkpoint.distributed.manifest import (
    DCP_VERSION,
    VERSION,
    DistributedBase,
    DistributedManifest,
    WrittenItem,
    collect_results,
)
from slimtensors.checkpoint.distributed.pending import (
    PendingFolder,
    RemotePending,
    check_path,
    create_run_id,
    resolve_folder,
)
from slimtensors.checkpoint.distributed.pieces import PIECE_BYTES, Box, KeyPath, Piece, split_box
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.checkpoint.documents import is_plain_name
from slimtensors.checkpoint.profiles import (
    Filter,
    Profile,
    StateTensorInfo,
    find_profile,
    select_tensors,
)
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Chooser
from slimtensors.errors import ConfigError, MismatchError, UnsupportedTensorError
from slimtensors.storage import Folder, RemoteLocation, StrPath, file_size, parent_of
from slimtensors.storage.files import name_write_errors
from slimtensors.storage.multipart import upload_file
from slimtensors.tensor import Spec, check_storable

_COPY_AHEAD = 10_000_000
"""Default of torch's `FileSystemWriter`."""


class StorageWriter(TorchStorageWriter):
    """A storage writer for `dcp.save` and `dcp.async_save`.

    Each rank codes its shards with a preset and writes one safetensors file. With `base`, another
    checkpoint in the same parent folder, saved by any number of ranks, only differences are
    stored. `profile` and `lossy` select what may be rounded, as in `slimtensors.checkpoint`.

    A save is atomic: the checkpoint is complete or absent. An existing checkpoint is replaced once
    the new one is complete, or is an error without `overwrite`. Other files in the folder stay.
    The path may be an fsspec URL: each rank uploads its file, and the manifest is written last.
    `storage_options` are passed to fsspec.

    Rows are stored in pieces of `piece_bytes`; a rank that needs one row decodes its whole piece.

    The remaining options are those of torch's `FileSystemWriter`. `thread_count` is another name
    of `threads`; of the others, only the default is supported.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> state = {"model": {"weight": torch.ones(64, 64)}}
        >>> _ = dcp.save(state, storage_writer=StorageWriter("run-1"), no_dist=True)
        >>> delta = StorageWriter("run-2", base="run-1")
        >>> _ = dcp.save(state, storage_writer=delta, no_dist=True)
    """

    def __init__(
        self,
        path: StrPath | None = None,
        *,
        preset: str | Plan | Chooser = "lossless",
        profile: str | Profile = "exact",
        lossy: Filter | None = None,
        base: StrPath | None = None,
        overwrite: bool = True,
        piece_bytes: int = PIECE_BYTES,
        threads: int | None = None,
        thread_count: int | None = None,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        per_thread_copy_ahead: int = _COPY_AHEAD,
        cache_staged_state_dict: bool = False,
        storage_options: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        _require("single_file_per_rank", single_file_per_rank, True, "each rank writes one file")
        _require("sync_files", sync_files, True, "files are always synced to disk")
        copy_ahead = "tensors are copied one by one"
        _require("per_thread_copy_ahead", per_thread_copy_ahead, _COPY_AHEAD, copy_ahead)
        staging = "pass async_stager=DefaultStager(…) to async_save, which reuses its memory"
        _require("cache_staged_state_dict", cache_staged_state_dict, False, staging)
        if thread_count is not None:
            if threads is not None:
                raise ConfigError("pass threads or thread_count, not both")
            threads = thread_count
        self.checkpoint_id = None if path is None else check_path(path)
        self._storage_options = storage_options
        self._target: Folder | None = None
        self.save_id = create_run_id()
        """Id of the last save, or of the next one before there is any."""
        self._piece_bytes = piece_bytes
        self._preset_name = preset if isinstance(preset, str) else "own"
        self._options = CodingOptions(preset, find_profile(profile), lossy, None, threads)
        self._base_path, self._overwrite = base, overwrite
        self._base: DistributedBase | None = None
        self._settings: _SaveSettings | None = None
        self._pending: PendingFolder | RemotePending | None = None
        self._is_saved = False
        self._has_cached_plans = False
        if piece_bytes < 1:
            raise ConfigError(f"piece_bytes must be at least 1, got {piece_bytes}")
        found = self._options.profile
        if found.is_model_only:
            raise ConfigError(f"profile {found.name!r} is not supported; save only the model")
        if lossy is not None and found.is_exact:
            raise ConfigError(
                "lossy selects tensors to round, but the profile is exact; pass profile="
            )

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Prepare to write another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = check_path(checkpoint_id)
        self.save_id, self._is_saved = create_run_id(), False

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise `ConfigError` if several ranks do not coordinate."""
        is_alone = not dist.is_initialized() or dist.get_world_size() == 1
        if not kwargs.get("use_collectives", True) and not is_alone:
            raise ConfigError(
                "use_collectives=False is not supported with several ranks: all commit together"
            )

    def storage_meta(self) -> StorageMeta | None:
        """Return path and id of the save that begins."""
        if self._is_saved:
            self.save_id, self._is_saved = create_run_id(), False
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Open the base, and return the plan unchanged."""
        target = resolve_folder(self._require_path(), self._storage_options)
        self._target = target
        self._options, self._base = replace(self._options, base=None), None
        if self._base_path is not None:
            folder = resolve_folder(self._base_path, self._storage_options)
            if parent_of(folder) != parent_of(target) or folder == target:
                raise ConfigError(f"{folder}: a base must be another checkpoint in the same folder")
            if not is_plain_name(folder.name):
                raise ConfigError(f"{folder}: the name of a base must not be hidden")
            stored = StoredShards(folder, deltas=[target])
            self._options = replace(self._options, base=stored)
            self._base = DistributedBase(folder.name, stored.manifest.run)
        self._settings = _SaveSettings(
            VERSION,
            version("slimtensors"),
            str(target),
            self._preset_name,
            self._options.profile.name,
            self._base.run if self._base else None,
            self._piece_bytes,
        )
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the folder of the save, and assign a file to each rank."""
        assert self._settings is not None
        self._has_cached_plans = not all(plan.usable for plan in plans)
        if self._options.lossy is not None and not self._has_cached_plans:
            infos = (info for plan in plans for info in _describe_plan(plan))
            select_tensors(self._options.lossy, {info.name: info for info in infos})
        pending: PendingFolder | RemotePending
        if isinstance(self._target, RemoteLocation):
            pending = RemotePending(self._target, self.save_id, overwrite=self._overwrite)
        else:
            path = self._require_path()
            pending = PendingFolder(path, self.save_id, overwrite=self._overwrite)
        self._pending = pending
        folder = pending.path if isinstance(pending.path, Path) else None
        orders = [
            _RankOrder(RankAssignment(pending.run, folder, rank), self._settings)
            for rank in range(len(plans))
        ]
        _received.order = orders[0]  # a single process does not send it
        return [
            replace(plan, storage_data=order) for plan, order in zip(plans, orders, strict=True)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        order = _received.order
        assert self._settings is not None
        _check_settings(order.assignment.rank, self._settings, order.settings)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(order.assignment, plan, planner) if plan.items else [])
        self._options = replace(self._options, base=None)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all items were written, and commit the checkpoint with its manifest."""
        pending = self._pending
        assert pending is not None
        if self._options.lossy is not None and self._has_cached_plans:
            select_tensors(self._options.lossy, _describe_metadata(metadata))
        tensors, objects, files = collect_results(metadata, results)
        for name, size in files.items():
            file = pending.path / name
            if not file.is_file() or file_size(file) != size:
                raise MismatchError(f"{file} is missing or was changed after its rank wrote it")
        items = [(result.index.fqn, result.storage_data) for part in results for result in part]
        errors = _find_largest_errors(items)
        profile = self._options.profile
        manifest = DistributedManifest(
            run=pending.run,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world=len(results),
            profile=self._preset_name if profile.is_exact and errors else profile.name,
            files=files,
            tensors=tensors,
            objects=objects,
            base=self._base,
            piece_bytes=self._piece_bytes,
            errors=errors,
            kept_exact={name: item.note for name, item in items if item.note},
        )
        stored = pending.commit(manifest)
        self._pending, self._is_saved = None, True
        names = dict(zip(files, stored.files, strict=True))
        metadata.version = DCP_VERSION
        metadata.storage_data = {
            result.index: replace(result.storage_data, file=names[result.storage_data.file])
            for part in results
            for result in part
        }
        metadata.storage_meta = StorageMeta(checkpoint_id=self.checkpoint_id, save_id=pending.run)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True: any path or URL is valid until it is written."""
        return True

    def _require_path(self) -> StrPath:
        if self.checkpoint_id is None:
            raise ConfigError("no target given; pass StorageWriter(path) or checkpoint_id=")
        return self.checkpoint_id

    def _write(
        self, assignment: RankAssignment, plan: SavePlan, planner: SavePlanner
    ) -> list[WriteResult]:
        if assignment.folder is not None and not assignment.folder.is_dir():
            raise ConfigError(
                f"{assignment.folder} not found: another save to the same path has started, or the"
                " ranks do not share a file system"
            )
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        limit = self._piece_bytes
        pieces = [piece for item in tensors for piece in _split_item(item, plan, planner, limit)]
        values = {item.index.fqn: _find_object(item, planner) for item in objects}
        full_state = getattr(planner, "state_dict", {})
        with ExitStack() as stack:
            stack.enter_context(name_write_errors(self._require_path()))
            folder = assignment.folder
            if folder is None:
                folder = Path(stack.enter_context(TemporaryDirectory(prefix="slimtensors-")))
            saved = write_rank_file(folder, assignment, pieces, values, full_state, self._options)
            if isinstance(self._target, RemoteLocation):
                name = f"{Path(saved.file).stem}-{assignment.run}.safetensors"
                upload_file(folder / saved.file, self._target / name)
                saved = replace(saved, file=name)

        def make_result(item: WriteItem) -> WriteResult:
            name = item.index.fqn
            error, note = saved.errors.get(name), saved.kept_exact.get(name, "")
            size = item.tensor_storage_size() or 0
            return WriteResult(item.index, size, WrittenItem(saved.file, saved.bytes, error, note))

        return [make_result(item) for item in plan.items]


def _require(name: str, value: object, default: object, reason: str) -> None:
    """Raise `ConfigError` if an option has another value than the only supported one."""
    if value != default:
        raise ConfigError(f"{name}={value!r} is not supported: {reason}")


@dataclass(frozen=True)
class _SaveSettings:
    """Settings that must be the same on all ranks; each compares its own with the coordinator's."""

    format: int
    library: str
    target: str
    preset: str
    profile: str
    base: str | None
    """Run id of the base."""
    piece_bytes: int


@dataclass(frozen=True)
class _RankOrder:
    """The coordinator's message to a rank, which is sent with its plan.

    It is kept when it arrives: with `enable_plan_caching`, planners replace an unchanged plan by
    that of an earlier save, whose storage data is out of date.
    """

    assignment: RankAssignment
    settings: _SaveSettings

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _received.order = self


class _Received(threading.local):
    """The last message that arrived in this thread."""

    order: _RankOrder


_received = _Received()


def _check_settings(rank: int, actual: _SaveSettings, expected: _SaveSettings) -> None:
    """Raise `MismatchError` if the settings of a rank differ from those of the coordinator."""
    for field in fields(_SaveSettings):
        own, other = getattr(actual, field.name), getattr(expected, field.name)
        if own != other:
            raise MismatchError(
                f"rank {rank} has {field.name} {own!r}, rank 0 has {other!r};"
                " all ranks must use the same settings"
            )


def _describe_plan(plan: SavePlan) -> Iterator[StateTensorInfo]:
    """Yield the role of each tensor of a plan."""
    for item in plan.items:
        if item.tensor_data is not None:
            name = item.index.fqn
            spec = Spec(item.tensor_data.properties.dtype, tuple(item.tensor_data.size))
            yield describe_tensor(name, spec, _find_path(plan, name))


def _describe_metadata(metadata: Metadata) -> dict[str, StateTensorInfo]:
    """Return the role of each tensor of a save."""
    paths = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    return {
        name: describe_tensor(name, Spec(item.properties.dtype, tuple(item.size)), paths.get(name))
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def _split_item(
    item: WriteItem, plan: SavePlan, planner: SavePlanner, limit: int
) -> Iterator[Piece]:
    """Yield the pieces of a rank's chunk of a tensor, as views."""
    assert item.tensor_data is not None
    name, chunk = item.index.fqn, item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    x = check_storable(name, planner.resolve_data(item)).detach()
    if tuple(x.shape) != box.shape:
        raise MismatchError(f"{name}: expected shape {box.shape}, got {tuple(x.shape)}")
    spec, path = Spec(x.dtype, tuple(item.tensor_data.size)), _find_path(plan, name)
    for part in split_box(box, x.dtype, limit):
        yield Piece(name, spec, path, part, part.narrow(x, box))


def _find_object(item: WriteItem, planner: SavePlanner) -> Any:
    """Return the value of an item that is not a tensor, never in pickled form."""
    if isinstance(planner, DefaultSavePlanner) and all(
        getattr(type(planner), name) is getattr(DefaultSavePlanner, name)
        for name in ("resolve_data", "transform_object")
    ):
        return planner.lookup_object(item.index)
    raw = planner.resolve_data(item)
    assert isinstance(raw, io.BytesIO)
    raw.seek(0)
    try:
        with torch.serialization.safe_globals(PICKLED_TYPES):
            return torch.load(raw, weights_only=True)
    except Exception as error:
        reason = str(error).partition("WeightsUnpickler error: ")[2].strip().partition("\n")[0]
        raise UnsupportedTensorError(
            f"{item.index.fqn}: the bytes of planner {type(planner).__name__} are not a file of"
            f" torch.save that weights_only=True can read: {reason or 'unknown format'}"
        ) from error


def _find_path(plan: SavePlan, name: str) -> KeyPath | None:
    """Return the key path of a value in the nested state, if the planner provides it."""
    paths = plan.planner_data
    return paths.get(name) if isinstance(paths, Mapping) else None


def _find_largest_errors(items: Sequence[tuple[str, WrittenItem]]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, item in items:
        if item.error is not None:
            errors[name] = max(errors.get(name, 0.0), item.error)
    return errors
