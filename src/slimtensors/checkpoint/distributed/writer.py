"""Save through `torch.distributed.checkpoint`: one file per rank, committed together."""

import io
import os
import secrets
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slimtensors.checkpoint.distributed.coding import (
    CodingOptions,
    RankAssignment,
    describe_tensor,
    write_rank_file,
)
from slimtensors.checkpoint.distributed.manifest import (
    VERSION,
    DistributedBase,
    DistributedManifest,
    WrittenItem,
    collect_results,
    read_base_name,
    write_distributed_manifest,
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
from slimtensors.storage import (
    StrPath,
    is_distributed,
    local_path,
    temporary_folder,
)
from slimtensors.storage.atomic import check_absent, commit_folder
from slimtensors.tensor import Spec, check_storable


class StorageWriter(TorchStorageWriter):
    """A storage writer for `dcp.save` and `dcp.async_save`.

    Each rank codes its shards with a preset and writes one safetensors file. With `base`, another
    checkpoint in the same parent folder, saved by any number of ranks, only differences are
    stored. `profile` and `lossy` select what may be rounded, as in `slimtensors.checkpoint`.

    A save is atomic: the checkpoint is complete or absent. An existing checkpoint is an error, or
    replaced once the new one is complete if `overwrite`. Rows are stored in pieces of
    `piece_bytes`; a rank that needs one row decodes its whole piece.

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
        overwrite: bool = False,
        piece_bytes: int = PIECE_BYTES,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = None if path is None else local_path(path)
        self._piece_bytes = piece_bytes
        self._preset_name = preset if isinstance(preset, str) else "own"
        self._options = CodingOptions(preset, find_profile(profile), lossy, None, threads)
        self._base_path, self._overwrite = base, overwrite
        self._base: DistributedBase | None = None
        self._pending: PendingFolder | None = None
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
            self.checkpoint_id = local_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise `ConfigError` if the ranks do not coordinate."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False is not supported: all ranks commit together")

    def storage_meta(self) -> StorageMeta | None:
        """Return the path of the checkpoint as metadata."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add the settings of this rank to its plan."""
        target = resolve_path(self._require_path())
        self._options, self._base = replace(self._options, base=None), None
        if self._base_path is not None:
            folder = resolve_path(self._base_path)
            if folder.parent != target.parent or folder == target:
                raise ConfigError(f"{folder}: a base must be another checkpoint in the same folder")
            if not is_plain_name(folder.name):
                raise ConfigError(f"{folder}: the name of a base must not be hidden")
            stored = StoredShards(folder, deltas=[target])
            self._options = replace(self._options, base=stored)
            self._base = DistributedBase(folder.name, stored.manifest.run)
        settings = _SaveSettings(
            VERSION,
            version("slimtensors"),
            str(target),
            self._preset_name,
            self._options.profile.name,
            self._base.run if self._base else None,
            self._piece_bytes,
        )
        return replace(plan, storage_data=settings)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks have the same settings, and assign a file to each."""
        if not all(plan.usable for plan in plans):
            raise ConfigError("cached plans (enable_plan_caching) are not supported")
        _check_settings([plan.storage_data for plan in plans])
        if self._options.lossy is not None:
            infos = (info for plan in plans for info in _describe_plan(plan))
            select_tensors(self._options.lossy, {info.name: info for info in infos})
        self._pending = PendingFolder(self._require_path(), overwrite=self._overwrite)
        run, folder = self._pending.run, self._pending.path
        return [
            replace(plan, storage_data=RankAssignment(run, folder, rank))
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        self._options = replace(self._options, base=None)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all items were written, write the manifest, and rename the folder."""
        pending = self._pending
        assert pending is not None
        tensors, objects, files = collect_results(metadata, results)
        for name, size in files.items():
            file = pending.path / name
            if not file.is_file() or file.stat().st_size != size:
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
        pending.commit(manifest)
        self._pending = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Return True if this is a local path."""
        return "://" not in str(checkpoint_id)

    def _require_path(self) -> StrPath:
        if self.checkpoint_id is None:
            raise ConfigError("no target given; pass StorageWriter(path) or checkpoint_id=")
        return self.checkpoint_id

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        assignment = plan.storage_data
        if not assignment.folder.is_dir():
            raise ConfigError(
                f"{assignment.folder} not found: another save to the same path has started, or the"
                " ranks do not share a file system"
            )
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        saved = write_rank_file(
            assignment,
            [x for item in tensors for x in _split_item(item, plan, planner, self._piece_bytes)],
            {item.index.fqn: _find_object(item, planner) for item in objects},
            getattr(planner, "state_dict", {}),
            self._options,
        )

        def make_result(item: WriteItem) -> WriteResult:
            name = item.index.fqn
            error, note = saved.errors.get(name), saved.kept_exact.get(name, "")
            size = item.tensor_storage_size() or 0
            return WriteResult(item.index, size, WrittenItem(saved.file, saved.bytes, error, note))

        return [make_result(item) for item in plan.items]


class PendingFolder:
    """The temporary folder of a save; deleted with this object unless it is committed."""

    def __init__(self, path: StrPath, *, overwrite: bool = False) -> None:
        self.run = secrets.token_hex(8)
        self._target = resolve_path(path)
        self._replaces = overwrite and is_distributed(self._target)
        if self._replaces:
            _check_no_deltas(self._target)
        else:
            check_absent(self._target)
        resources = ExitStack()
        self.path = resources.enter_context(temporary_folder(self._target))
        self._close = weakref.finalize(self, resources.close)

    def commit(self, manifest: DistributedManifest) -> None:
        """Write the manifest, and rename the folder to its final name."""
        write_distributed_manifest(self.path, manifest)
        commit_folder(self.path, self._target, replace=self._replaces)
        self._close()


def resolve_path(path: StrPath) -> Path:
    """Return the absolute path of a checkpoint, with symlinks resolved."""
    return Path(os.path.realpath(local_path(path)))


def _check_no_deltas(target: Path) -> None:
    """Raise `ConfigError` if this checkpoint is the base of another one in the same folder."""
    for folder in sorted(target.parent.iterdir()):
        if folder != target and is_distributed(folder) and read_base_name(folder) == target.name:
            raise ConfigError(
                f"{target} cannot be overwritten: it is the base of {folder.name};"
                f" remove {folder.name} first, or save elsewhere"
            )


@dataclass(frozen=True)
class _SaveSettings:
    """Settings that must be the same on all ranks; each rank sends them with its plan."""

    format: int
    library: str
    target: str
    preset: str
    profile: str
    base: str | None
    """Run id of the base."""
    piece_bytes: int


def _check_settings(settings: Sequence[_SaveSettings]) -> None:
    """Raise `MismatchError` if the settings of two ranks differ."""
    for rank, other in enumerate(settings):
        for field in fields(_SaveSettings):
            expected, actual = getattr(settings[0], field.name), getattr(other, field.name)
            if expected != actual:
                raise MismatchError(
                    f"rank {rank} has {field.name} {actual!r}, rank 0 has {expected!r};"
                    " all ranks must use the same settings"
                )


def _describe_plan(plan: SavePlan) -> Iterator[StateTensorInfo]:
    """Yield the role of each tensor of a plan."""
    for item in plan.items:
        if item.tensor_data is not None:
            name = item.index.fqn
            spec = Spec(item.tensor_data.properties.dtype, tuple(item.tensor_data.size))
            yield describe_tensor(name, spec, _find_path(plan, name))


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
    default = DefaultSavePlanner.transform_object
    if isinstance(planner, DefaultSavePlanner) and type(planner).transform_object is default:
        return planner.lookup_object(item.index)
    raw = planner.resolve_data(item)
    assert isinstance(raw, io.BytesIO)
    raw.seek(0)
    try:
        return torch.load(raw, weights_only=True)
    except Exception as error:
        raise UnsupportedTensorError(
            f"{item.index.fqn}: cannot read the bytes of planner {type(planner).__name__}"
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
