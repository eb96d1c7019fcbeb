"""Checkpoints for Lightning and Fabric: compressed, and stored as differences from earlier ones.

For `lightning` and for `pytorch_lightning`, whichever the program has imported.
"""

import inspect
import io
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any, TypeVar

import torch
from torch import Tensor
from torch.serialization import default_restore_location

from slimtensors.checkpoint.manifest import MANIFEST
from slimtensors.checkpoint.pretrained import open_pretrained
from slimtensors.checkpoint.profiles import Profile, find_profile
from slimtensors.checkpoint.run import (
    Point,
    check_base_options,
    choose_base,
    count_since_keyframe,
    discard_checkpoint,
    is_kept_base,
    keep_for_deltas,
    list_checkpoints,
    remove_incomplete,
    remove_unneeded_bases,
    save_with_base,
)
from slimtensors.checkpoint.store import (
    STATE,
    FlatState,
    Place,
    SaveOptions,
    StoredState,
    load_state_file,
    save_state,
)
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.parallel import check_threads
from slimtensors.storage import LocalLocation, RemoteLocation, StrPath, locate
from slimtensors.storage.atomic import (
    commit_folder,
    lock_replacement,
    make_folders,
    temporary_name,
)
from slimtensors.storage.files import name_write_errors

T = TypeVar("T")

_PACKAGES = ("lightning.fabric", "lightning_fabric")

_HYPERPARAMETERS = {
    "hparams_type": "hyper_parameters",
    "datamodule_hparams_type": "datamodule_hyper_parameters",
}
"""Where a checkpoint contains hyperparameters of OmegaConf, by the key of their class."""


def _import_plugins() -> Any:
    """Import the plug-ins of an imported package, or else of an installed one."""
    for package in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(f"{package}.plugins")
        except ModuleNotFoundError as error:
            if error.name != package.partition(".")[0]:
                raise
    raise MissingDependencyError("lightning", "lightning")


_plugins = _import_plugins()


def _keep_on_cpu(storage: Any, location: str) -> Any:
    """Return the storage: Lightning's own default, which leaves tensors on the CPU."""
    return storage


class SlimCheckpointIO(_plugins.CheckpointIO):  # type: ignore[name-defined]
    """Lightning plug-in that saves each checkpoint as a compressed folder.

    A checkpoint that Lightning removes or replaces is gone; what others need of it stays in a
    folder `base-ID` beside them until none needs it. Lightning's own files are loaded and removed
    as by Lightning.

    Paths may be URLs of fsspec. A remote checkpoint is complete, and a single file: it is written
    to a local temporary folder and uploaded; to load it, it is downloaded first.

    Args:
        base: `auto` saves differences from the last full checkpoint in the same folder, `chain`
            from the last one, None saves each in full.
        keyframe_every: save in full at least once in so many checkpoints.
        profile: precision of weights and optimizer state, as for `save_checkpoint`.
        pretrained: folder or file of the model from which weights are stored as differences; not
            for remote checkpoints. To load, it is also searched where it was.
        threads: number of threads; by default one per core.
        storage_options: options of the file system of remote checkpoints.

    Example:
        >>> from lightning import Trainer
        >>> from slimtensors.integrations.lightning import SlimCheckpointIO
        >>> trainer = Trainer(plugins=[SlimCheckpointIO(profile="optimizer-bf16")])
    """

    def __init__(
        self,
        *,
        base: str | None = "auto",
        keyframe_every: int = 8,
        profile: str | Profile = "exact",
        pretrained: StrPath | None = None,
        threads: int | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        check_base_options(base, keyframe_every)
        self._pretrained = open_pretrained(pretrained)
        self._profile = find_profile(profile)
        if self._profile.is_model_only:
            raise ConfigError(
                f"Lightning cannot resume from profile {self._profile.name!r}; use another one with"
                " ModelCheckpoint(save_weights_only=True)"
            )
        check_threads(threads)
        self._base, self._keyframe_every, self._threads = base, keyframe_every, threads
        self._storage_options = dict(storage_options or {})
        self._lock = threading.Lock()
        self._removals: deque[Path] = deque()
        for package in _PACKAGES:  # a program may import both; each has a class of its own
            if plugins := sys.modules.get(f"{package}.plugins"):
                plugins.CheckpointIO.register(type(self))

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: StrPath, storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint; replace one of the same name when the new one is complete."""
        location = _locate(path, self._storage_options | _check_options(path, storage_options))
        state = FlatState.of(_without_classes(checkpoint))
        if isinstance(location, RemoteLocation):
            self._upload(state, location)
            return
        with self._lock:
            self._save(state, location.path)
        self._remove_pending()

    def load_checkpoint(
        self,
        path: StrPath,
        map_location: Any | None = _keep_on_cpu,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint of this plug-in or of Lightning.

        `map_location` is the one of `torch.load`. Tensors are stored without their device, as if
        saved on the CPU. `weights_only` is for Lightning's own files; others are never unpickled.
        """
        location = _locate(path, self._storage_options)
        if not _is_slim(location):
            options = {} if weights_only is None else {"weights_only": weights_only}
            native = _plugins.TorchCheckpointIO()
            return dict(native.load_checkpoint(path, map_location=map_location, **options))
        place = _make_place(map_location)
        if isinstance(location, LocalLocation):
            return _with_classes(self._load(location.path, place))
        with TemporaryDirectory() as folder:
            location.download(Path(folder, STATE))
            return _with_classes(self._load(Path(folder, STATE), place))

    def remove_checkpoint(self, path: StrPath) -> None:
        """Remove a checkpoint of this plug-in or of Lightning, if it exists.

        A link is removed, and what it leads to stays. While another thread saves a checkpoint
        (`AsyncCheckpointIO`), which may need this one as a base, the removal is deferred.
        """
        location = _locate(path, self._storage_options)
        if isinstance(location, RemoteLocation):
            location.remove()
            return
        self._removals.append(location.path)
        self._remove_pending()

    def _save(self, state: FlatState, target: Path) -> None:
        with _lock_run(target.parent):
            remove_incomplete(target.parent)
            base = self._choose_base(target)
            is_single = target.is_symlink() or target.is_file()
            if not is_single and target.is_dir():
                if any(target.iterdir()) and not _is_ours(target):
                    raise ConfigError(f"{target} is a folder of other files and is not replaced")
                keep_for_deltas(target)
            options = SaveOptions(
                base.path if base else None,
                self._profile,
                threads=self._threads,
                replace=True,
                pretrained=self._pretrained,
            )
            new = target
            if is_single or "ckpt_" in target.name:
                # Lightning takes the digits after "ckpt_" in all names, also of leftovers, as a
                # number. Links are not followed: the checkpoint of save_last="link" stays.
                new = temporary_name(target.with_name(target.name.replace("ckpt_", "ckpt-")))
            save_with_base(state, new, options)
            if new != target:
                commit_folder(new, target, replace=True)
            remove_unneeded_bases(target.parent)

    def _load(self, path: Path, place: Place) -> dict[str, Any]:
        target = Path(os.path.realpath(path))  # beside the base, if the path is a link
        if target.is_dir():
            pretrained = self._pretrained.path if self._pretrained else None
            stored = StoredState(target, pretrained=pretrained)
            return stored.load_state(threads=self._threads, place=place)
        return load_state_file(target, threads=self._threads, place=place)

    def _choose_base(self, target: Path) -> Point | None:
        """Return the base of a new checkpoint, or None to save it in full.

        Hidden checkpoints are temporary files of Lightning and saved in full: others could not be
        removed because of them. `last.ckpt` is no base, because Lightning itself replaces it.
        """
        if target.name.startswith("."):
            return None
        found = [
            point
            for point in list_checkpoints(target.parent)
            if point.path != target
            and not point.path.is_symlink()
            and not point.name.startswith("last")
            and not is_kept_base(point)
        ]
        return choose_base(found, self._base, count_since_keyframe(found), self._keyframe_every)

    def _upload(self, state: FlatState, location: RemoteLocation) -> None:
        with TemporaryDirectory() as folder:
            options = SaveOptions(profile=self._profile, threads=self._threads)
            save_state(state, Path(folder, "checkpoint"), options)
            location.parent().make_folder()
            location.upload(Path(folder, "checkpoint", STATE))

    def _remove_pending(self) -> None:
        """Remove checkpoints unless one is being saved; its thread removes them afterwards."""
        while self._removals and self._lock.acquire(blocking=False):
            try:
                while self._removals:
                    _remove(self._removals.popleft())
            finally:
                self._lock.release()


def load_from_checkpoint(
    cls: type[T], checkpoint_path: StrPath | IO[bytes], *args: Any, **options: Any
) -> T:
    """Return `cls.load_from_checkpoint(checkpoint_path, …)`, also for checkpoints of this plug-in.

    Lightning's classmethod bypasses all plug-ins and can only open files.

    Example:
        >>> from slimtensors.integrations.lightning import load_from_checkpoint
        >>> model = load_from_checkpoint(Model, "run/last.ckpt")  # doctest: +SKIP
    """
    load = cls.load_from_checkpoint  # type: ignore[attr-defined]
    loaded: T = _load_with(load, checkpoint_path, *args, **options)
    return loaded


class _LoadMethod:
    """`load_from_checkpoint` of Lightning, also for our checkpoints; like it, only for classes."""

    def __get__(self, instance: object, owner: type) -> Callable[..., Any]:
        found: Any = super(SlimCheckpointMixin, owner if instance is None else instance)
        return partial(_load_with, found.load_from_checkpoint)


class SlimCheckpointMixin:
    """Base of a `LightningModule` or `LightningDataModule` whose `load_from_checkpoint` reads ours.

    Example:
        >>> from lightning import LightningModule
        >>> class Model(SlimCheckpointMixin, LightningModule): ...
    """

    load_from_checkpoint = _LoadMethod()


def _load_with(
    load: Callable[..., Any], checkpoint_path: StrPath | IO[bytes], *args: Any, **options: Any
) -> Any:
    """Call Lightning's `load_from_checkpoint`, with a file in memory for a checkpoint of ours."""
    if not isinstance(checkpoint_path, str | os.PathLike):
        return load(checkpoint_path, *args, **options)
    is_download = str(checkpoint_path).startswith(("http://", "https://"))  # by torch
    if is_download or not _is_slim(_locate(checkpoint_path, {})):
        return load(checkpoint_path, *args, **options)
    buffer = io.BytesIO()
    torch.save(SlimCheckpointIO().load_checkpoint(checkpoint_path), buffer)
    buffer.seek(0)
    parameters = list(inspect.signature(load).parameters)
    if "weights_only" in parameters[1 + len(args) :] and options.get("weights_only") is None:
        options["weights_only"] = False  # the pickle was made here, of plain values
    return load(buffer, *args, **options)


def _without_classes(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Return a checkpoint with the class of hyperparameters replaced by its name."""
    classes = {key: checkpoint[key] for key in _HYPERPARAMETERS if key in checkpoint}
    names = {key: cls.__name__ for key, cls in classes.items() if isinstance(cls, type)}
    return {**checkpoint, **names} if names else checkpoint


def _with_classes(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Undo `_without_classes`; the class is that of the loaded hyperparameters."""
    for key, name in _HYPERPARAMETERS.items():
        cls = type(checkpoint.get(name))
        if checkpoint.get(key) == cls.__name__:
            checkpoint[key] = cls
    return checkpoint


def _locate(path: StrPath, options: dict[str, Any]) -> LocalLocation | RemoteLocation:
    """Return the location of a path or URL; `file://` is local."""
    location = locate(path, storage_options=options)
    if isinstance(location, RemoteLocation) and "file" in location.protocols:
        return LocalLocation(Path(location.path))
    assert isinstance(location, LocalLocation | RemoteLocation)
    return location


def _check_options(path: StrPath, options: Any | None) -> dict[str, Any]:
    """Return the options of one save; raise `TypeError`, as Lightning does, if it has no use."""
    if options is None:
        return {}
    if not isinstance(options, Mapping) or "://" not in os.fspath(path):
        raise TypeError(
            "`Trainer.save_checkpoint(..., storage_options=...)` with `storage_options` arg is not"
            " supported for `SlimCheckpointIO`, except a dict of fsspec options for a URL"
        )
    return dict(options)


def _is_slim(location: LocalLocation | RemoteLocation) -> bool:
    """Return True for a folder, or a file that starts like a safetensors file."""
    if not location.exists():
        return False
    if location.is_folder():
        if isinstance(location, RemoteLocation):
            raise ConfigError(f"{location} is a folder; copy it and its bases to a local folder")
        return True
    file = location.open()
    start = bytes(file.read(0, min(file.size, 9)))
    return start[4:] == b"\0\0\0\0{"  # torch's files start with PK or a pickle


def _is_ours(folder: Path) -> bool:
    return (folder / MANIFEST).exists() or (folder / STATE).exists()


def _remove(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    elif _is_ours(path):
        with _lock_run(path.parent):
            discard_checkpoint(path)
    else:
        _plugins.TorchCheckpointIO().remove_checkpoint(path)


@contextmanager
def _lock_run(folder: Path) -> Iterator[None]:
    """Wait for other programs that save to the same folder: one might remove a base in use."""
    with name_write_errors(folder):
        make_folders(folder)
    with lock_replacement(folder / MANIFEST):
        yield


def _make_place(map_location: Any) -> Place:
    """Return a function that moves tensors as `torch.load` does; shared memory stays shared."""
    moved: dict[tuple[int, int], tuple[Any, Any]] = {}

    def place(x: Tensor) -> Tensor:
        if x.is_quantized or x.layout != torch.strided:
            return x.to(_restore(torch.empty(0).untyped_storage(), map_location).device)
        storage = x.untyped_storage()
        key = (storage.data_ptr(), storage.nbytes())
        if key not in moved:
            moved[key] = storage, _restore(storage, map_location)  # alive: addresses are reused
        new = moved[key][1]
        if new is storage:
            return x
        out = torch.empty(0, dtype=x.dtype, device=new.device)
        return out.set_(new, x.storage_offset(), x.size(), x.stride())

    return place


def _restore(storage: Any, map_location: Any) -> Any:
    """Return the storage where `torch.load` puts one that was saved on the CPU."""
    location = "cpu"
    if isinstance(map_location, str | torch.device):
        location = str(map_location)
    elif isinstance(map_location, Mapping):
        location = map_location.get(location, location)
    elif map_location is not None and (found := map_location(storage, location)) is not None:
        return found
    return default_restore_location(storage, location)  # type: ignore[no-untyped-call]
