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
from torch.distributed.checkpoint.storage import StorageWriter as Writer
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from slimtensors.checkpoint.distributed.coding import CodingOptions, Order, describe, save_share
from slimtensors.checkpoint.distributed.manifest import (
    PIECE,
    VERSION,
    Box,
    DistributedBase,
    DistributedManifest,
    base_name,
    is_distributed,
    split_box,
    write_manifest,
)
from slimtensors.checkpoint.distributed.pieces import Piece, Written, stored_tables
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.checkpoint.policy import Filter, Profile, RoleInfo, find_profile, select_tensors
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Chooser
from slimtensors.errors import ConfigError, MismatchError, UnsupportedTensorError
from slimtensors.storage import StrPath, local_path, temporary_folder
from slimtensors.storage.atomic import check_absent, commit_folder
from slimtensors.tensor import Spec, check_storable


class Pending:
    """The folder of a checkpoint that is being saved; it goes with this object or gets its name."""

    def __init__(self, path: StrPath, *, overwrite: bool = False) -> None:
        self.run = secrets.token_hex(8)
        self.target = real_path(path)
        self._replaces = overwrite and is_distributed(self.target)
        if self._replaces:
            _check_not_needed(self.target)
        else:
            check_absent(self.target)
        resources = ExitStack()
        self.folder = resources.enter_context(temporary_folder(self.target))
        self._close = weakref.finalize(self, resources.close)

    def commit(self, manifest: DistributedManifest) -> None:
        """Describe the checkpoint, which is then complete, and give it its name."""
        write_manifest(self.folder, manifest)
        commit_folder(self.folder, self.target, replace=self._replaces)
        self._close()


def real_path(path: StrPath) -> Path:
    """Return where a checkpoint lies, through links."""
    return Path(os.path.realpath(local_path(path)))


def _check_not_needed(target: Path) -> None:
    """Raise if a checkpoint beside this one could not be loaded without it."""
    for folder in sorted(target.parent.iterdir()):
        if folder != target and is_distributed(folder) and base_name(folder) == target.name:
            raise ConfigError(
                f"{target}: is not overwritten, because {folder.name} is a difference from it;"
                " remove that first, or save elsewhere"
            )


@dataclass(frozen=True)
class _Offer:
    """What a rank tells with its plan: all ranks must say the same."""

    format: int
    library: str
    target: str
    preset: str
    profile: str
    base: str | None
    """The run of the base."""
    piece_bytes: int


class StorageWriter(Writer):
    """A storage writer for `dcp.save` and `dcp.async_save`.

    Every rank codes its shards by a preset into a safetensors file of its own. With `base`, another
    checkpoint beside this one, which any number of ranks may have saved, only what differs is
    stored. `profile` and `lossy` say what may be rounded, as in `slimtensors.checkpoint`.

    The checkpoint is complete or absent: an existing one is refused, or replaced once the new one
    is complete if `overwrite`. `piece_bytes` are stored together: a rank that needs one row of them
    decodes them all.
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
        piece_bytes: int = PIECE,
        threads: int | None = None,
    ) -> None:
        super().__init__()
        self.checkpoint_id = None if path is None else local_path(path)
        self._piece_bytes = piece_bytes
        self._preset, self._profile, self._lossy = preset, find_profile(profile), lossy
        self._preset_label = preset if isinstance(preset, str) else "own"
        self._base_path, self._overwrite, self._threads = base, overwrite, threads
        self._base: StoredShards | None = None
        self._base_label: DistributedBase | None = None
        self._pending: Pending | None = None
        if piece_bytes < 1:
            raise ConfigError(f"piece_bytes must be at least 1, got {piece_bytes}")
        if self._profile.is_model_only:
            raise ConfigError(f"profile {self._profile.name!r}: save only the model instead")
        if lossy is not None and self._profile.is_exact:
            raise ConfigError("lossy chooses what to round, but nothing is to be: choose a profile")

    def reset(self, checkpoint_id: StrPath | None = None) -> None:
        """Begin another checkpoint."""
        if checkpoint_id is not None:
            self.checkpoint_id = local_path(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Refuse what cannot be complete or absent."""
        if not kwargs.get("use_collectives", True):
            raise ConfigError("use_collectives=False: a checkpoint is complete for all ranks")

    def storage_meta(self) -> StorageMeta | None:
        """Name the checkpoint."""
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Say with the plan how this rank would store it."""
        target = real_path(self._path())
        self._base = self._base_label = None
        if self._base_path is not None:
            home = real_path(self._base_path)
            if home.parent != target.parent or home == target:
                raise ConfigError(f"{home}: a base is another checkpoint in the same folder")
            self._base = StoredShards(home)
            self._base_label = DistributedBase(home.name, self._base.manifest.run)
        offer = _Offer(
            VERSION,
            version("slimtensors"),
            str(target),
            self._preset_label,
            self._profile.name,
            self._base_label.run if self._base_label else None,
            self._piece_bytes,
        )
        return replace(plan, storage_data=offer)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Check that all ranks would store the same checkpoint, and tell them where."""
        if not all(plan.usable for plan in plans):
            raise ConfigError("plans of an earlier save: enable_plan_caching is not supported")
        _check_same([plan.storage_data for plan in plans])
        if self._lossy is not None:
            select_tensors(
                self._lossy, {about.name: about for plan in plans for about in _abouts(plan)}
            )
        self._pending = Pending(self._path(), overwrite=self._overwrite)
        run, folder = self._pending.run, self._pending.folder
        return [
            replace(plan, storage_data=Order(run, folder, rank)) for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write the file of this rank."""
        done: Future[list[WriteResult]] = Future()
        done.set_result(self._write(plan, planner) if plan.items else [])
        self._base = None
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Check that all of it was written, describe it, and give the folder its name."""
        pending = self._pending
        assert pending is not None
        tensors, objects, files = stored_tables(metadata, results)
        for name, size in files.items():
            file = pending.folder / name
            if not file.is_file() or file.stat().st_size != size:
                raise MismatchError(f"{file}: is not what its rank has written")
        told = [(result.index.fqn, result.storage_data) for part in results for result in part]
        errors = _largest_errors(told)
        by_preset = self._profile.is_exact and errors
        manifest = DistributedManifest(
            run=pending.run,
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            world=len(results),
            profile=self._preset_label if by_preset else self._profile.name,
            files=files,
            tensors=tensors,
            objects=objects,
            base=self._base_label,
            piece_bytes=self._piece_bytes,
            errors=errors,
            kept_exact={name: item.note for name, item in told if item.note},
        )
        pending.commit(manifest)
        self._pending = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: StrPath) -> bool:
        """Tell whether this can be a place for checkpoints: a local path."""
        return "://" not in str(checkpoint_id)

    def _path(self) -> StrPath:
        if self.checkpoint_id is None:
            raise ConfigError("where to? Give StorageWriter a path, or dcp.save a checkpoint_id")
        return self.checkpoint_id

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        order = plan.storage_data
        if not order.folder.is_dir():
            raise ConfigError(
                f"{order.folder}: is not there: another save to the same place has begun, or the"
                " ranks do not share this disk"
            )
        tensors = [item for item in plan.items if item.type != WriteItemType.BYTE_IO]
        objects = [item for item in plan.items if item.type == WriteItemType.BYTE_IO]
        saved = save_share(
            order,
            [x for item in tensors for x in _pieces(item, plan, planner, self._piece_bytes)],
            {item.index.fqn: _value(item, planner) for item in objects},
            how=CodingOptions(self._profile, self._lossy, self._base),
            preset=self._preset,
            whole=getattr(planner, "state_dict", {}),
            threads=self._threads,
        )

        def result(item: WriteItem) -> WriteResult:
            name = item.index.fqn
            error, note = saved.errors.get(name), saved.kept_exact.get(name, "")
            size = item.tensor_storage_size() or 0
            return WriteResult(item.index, size, Written(saved.file, saved.bytes, error, note))

        return [result(item) for item in plan.items]


def _check_same(offers: Sequence[_Offer]) -> None:
    """Raise if two ranks would not store the same checkpoint in the same way."""
    for rank, offer in enumerate(offers):
        for field in fields(_Offer):
            mine, other = getattr(offers[0], field.name), getattr(offer, field.name)
            if mine != other:
                raise MismatchError(
                    f"rank {rank} has {field.name} {other!r}, rank 0 has {mine!r};"
                    " all ranks must save the same way"
                )


def _abouts(plan: SavePlan) -> Iterator[RoleInfo]:
    for item in plan.items:
        if item.tensor_data is not None:
            yield describe(item.index.fqn, _spec(item), _keys(plan, item.index.fqn))


def _pieces(item: WriteItem, plan: SavePlan, planner: SavePlanner, limit: int) -> Iterator[Piece]:
    """Yield what a rank has of a tensor, in pieces that share its memory."""
    assert item.tensor_data is not None
    name, chunk = item.index.fqn, item.tensor_data.chunk
    box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
    x = check_storable(name, planner.resolve_data(item)).detach()
    if tuple(x.shape) != box.shape:
        raise MismatchError(f"{name}: {tuple(x.shape)} to write, {box.shape} was planned")
    spec, path = Spec(x.dtype, tuple(item.tensor_data.size)), _keys(plan, name)
    for part in split_box(box, x.dtype, limit):
        yield Piece(name, spec, path, part, part.of(x, box))


def _value(item: WriteItem, planner: SavePlanner) -> Any:
    """Return what is no tensor: never as the pickle that planners make of it."""
    name = item.index.fqn
    plain = DefaultSavePlanner.transform_object
    if isinstance(planner, DefaultSavePlanner) and type(planner).transform_object is plain:
        return planner.lookup_object(item.index)
    raw = planner.resolve_data(item)
    assert isinstance(raw, io.BytesIO)
    raw.seek(0)
    try:
        return torch.load(raw, weights_only=True)
    except Exception as error:
        raise UnsupportedTensorError(f"{name}: the planner's bytes cannot be stored") from error


def _spec(item: WriteItem) -> Spec:
    assert item.tensor_data is not None
    return Spec(item.tensor_data.properties.dtype, tuple(item.tensor_data.size))


def _keys(plan: SavePlan, name: str) -> tuple[str | int, ...] | None:
    """Return where in the nested state something is, if the planner says so."""
    paths = plan.planner_data
    return paths.get(name) if isinstance(paths, Mapping) else None


def _largest_errors(told: Sequence[tuple[str, Written]]) -> dict[str, float]:
    errors: dict[str, float] = {}
    for name, item in told:
        if item.error is not None:
            errors[name] = max(errors.get(name, 0.0), item.error)
    return errors
