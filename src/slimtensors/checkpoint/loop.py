"""Checkpoints in a training loop: background saves, retention, resume."""

import logging
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self, SupportsFloat

import torch
from torch import nn

from slimtensors.archive import inspect
from slimtensors.checkpoint.loop_folder import LoopFolder, is_ours
from slimtensors.checkpoint.manifest import check_metrics, is_checkpoint, read_count, read_metrics
from slimtensors.checkpoint.pretrained import Pretrained, open_pretrained
from slimtensors.checkpoint.profiles import Profile, find_profile
from slimtensors.checkpoint.remote_run import RemoteOptions, RemoteRun, place_run
from slimtensors.checkpoint.run import (
    DAMAGED,
    Point,
    Retention,
    RunPoint,
    check_base_options,
    find_unreadable,
    list_checkpoints,
    remove_incomplete,
    save_with_base,
    select_resumable,
)
from slimtensors.checkpoint.snapshot import Snapshot
from slimtensors.checkpoint.state import (
    Checkpoint,
    Stateful,
    build_checkpoint,
    is_stateful,
    restore_checkpoint,
)
from slimtensors.checkpoint.store import STATE, FlatState, Saved, SaveOptions, StoredState
from slimtensors.errors import (
    ConfigError,
    FormatError,
    MismatchError,
    MissingBaseError,
    shorten_list,
)
from slimtensors.storage import StrPath
from slimtensors.storage.atomic import lock_folder

_log = logging.getLogger(__name__)


def checkpointing(
    run: StrPath,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    models: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, torch.optim.Optimizer] | None = None,
    schedulers: Mapping[str, Stateful] | None = None,
    scalers: Mapping[str, Stateful] | None = None,
    dataloader: Stateful | None = None,
    extra: Callable[[], Mapping[str, Any]] | Mapping[str, Stateful] | None = None,
    every: int = 100,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    best_is: str = "min",
    keep_history: bool = False,
    base: str | None = "auto",
    keyframe_every: int = 8,
    pretrained: StrPath | None = None,
    profile: str | Profile = "exact",
    async_: bool = True,
    resume: bool = True,
    on_commit: Callable[[Any], object] | None = None,
    threads: int | None = None,
    remote: StrPath | None = None,
    remote_every: int = 1,
    local_bytes: int | str | None = None,
    storage_options: dict[str, Any] | None = None,
) -> "Checkpointing":
    """Return a context manager that saves a training loop to the folder or URL `run`.

    It resumes from the newest intact checkpoint.

    `models`, `optimizers`, `schedulers` and `scalers` are further objects by name. `extra` is a
    function that returns values to save with each checkpoint (`resumed` contains them), or a
    mapping of objects with `state_dict` and `load_state_dict`, which are also restored.

    Checkpoints are stored as differences from the last keyframe; one save in `keyframe_every` is
    a keyframe. With `base="chain"` the previous checkpoint is the base, with `base=None` every
    checkpoint is a keyframe. `profile` selects what may be rounded, by default nothing.
    `pretrained` is the folder or file from which the model was loaded: weights that are still
    equal to it take no space, others are stored as differences. It must stay as it is. A resumed
    run uses the one of its checkpoints by default.
    Checkpoints that no `keep_…` option selects are removed, or with `keep_history` reduced to
    their weights in bf16.

    A step without a save costs nothing. A save waits for the previous one and for a copy of the
    state; the rest runs in a background thread, which calls `on_commit` with the new folder (or
    URL). Its errors are raised by the next call. On SIGTERM the next `step` saves and exits.

    With `remote`, a URL, every `remote_every`-th checkpoint and the last one are also uploaded, in
    another thread. Once they are, old local ones are removed until the rest fits `local_bytes`. A
    loop resumes from the newest checkpoint of both. If `run` is a URL, checkpoints are written to
    a temporary folder and uploaded before the save ends. `storage_options` are passed to fsspec.

    Example:
        >>> model = torch.nn.Linear(4, 4)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with checkpointing("run", model, optimizer, every=10, keep_last=2) as ckpt:
        ...     for step in range(ckpt.start, 40):
        ...         loss = model(torch.randn(8, 4)).square().mean()
        ...         loss.backward()
        ...         optimizer.step()
        ...         saved = ckpt.step(loss=loss.item())
    """
    if type(every) is not int or every < 1:
        raise ConfigError(f"every must be a positive integer, got {every!r}")
    check_base_options(base, keyframe_every)
    found = find_profile(profile)
    if found.is_model_only:
        raise ConfigError(f"cannot resume from profile {found.name!r}; use keep_history=True")
    folder, remote_options = place_run(run, remote, remote_every, local_bytes, storage_options)
    if remote_options is not None and keep_history:
        raise ConfigError("keep_history is not supported with a remote run")
    objects = TrainingObjects(
        model,
        optimizer,
        scheduler,
        scaler,
        dataloader,
        extra,
        models=models or {},
        optimizers=optimizers or {},
        schedulers=schedulers or {},
        scalers=scalers or {},
    )
    return Checkpointing(
        folder,
        objects,
        CheckpointOptions(
            every=every,
            retention=Retention(keep_last, keep_every, keep_best, best_is),
            keep_history=keep_history,
            base=base,
            keyframe_every=keyframe_every,
            profile=found,
            is_async=async_,
            resume=resume,
            on_commit=on_commit,
            threads=threads,
            pretrained=objects.open_pretrained(pretrained),
            remote=remote_options,
        ),
    )


@dataclass(frozen=True)
class TrainingObjects:
    """The objects whose state is saved."""

    model: nn.Module | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    dataloader: Stateful | None = None
    extra: Callable[[], Mapping[str, Any]] | Mapping[str, Stateful] | None = None
    files: Callable[[], Mapping[str, bytes]] | None = None
    """Returns additional small files to write with each checkpoint."""
    models: Mapping[str, nn.Module] = field(default_factory=dict)
    optimizers: Mapping[str, torch.optim.Optimizer] = field(default_factory=dict)
    schedulers: Mapping[str, Stateful] = field(default_factory=dict)
    scalers: Mapping[str, Stateful] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.model is None and not self.models:
            raise ConfigError("expected a model, or models={name: model}")
        for name in [name for name, part in self._stateful().items() if not is_stateful(part)]:
            raise ConfigError(
                f"extra: {name!r} has no state_dict and load_state_dict; pass a function that"
                " returns such values"
            )

    def build(self, step: int, epoch: int | None, metrics: Mapping[str, float]) -> Checkpoint:
        """Return their state, by reference."""
        return build_checkpoint(
            self.model,
            self.optimizer,
            self.scheduler,
            self.scaler,
            models=self.models,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            scalers=self.scalers,
            dataloader=self.dataloader,
            step=step,
            epoch=epoch,
            metrics=metrics,
            extra=self._collect_extra(),
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Load a state into the objects."""
        restore_checkpoint(
            checkpoint,
            self.model,
            self.optimizer,
            self.scheduler,
            self.scaler,
            models=self.models,
            optimizers=self.optimizers,
            schedulers=self.schedulers,
            scalers=self.scalers,
            dataloader=self.dataloader,
            extra=self._stateful(),
        )

    def open_pretrained(self, path: StrPath | None) -> Pretrained | None:
        """Return the pretrained model of the models; raise if it has other weights."""
        single = {} if self.model is None else {"": self.model}
        named = {f"{name}.": model for name, model in self.models.items()}
        return open_pretrained(path, single | named)

    def _stateful(self) -> Mapping[str, Stateful]:
        """Return the objects of `extra` that are restored."""
        return self.extra if isinstance(self.extra, Mapping) else {}

    def _collect_extra(self) -> Mapping[str, Any]:
        if not callable(self.extra):
            return self._stateful()
        extra = self.extra()
        for name in [name for name, value in extra.items() if is_stateful(value)]:
            raise ConfigError(
                f"extra: {name!r} is an object; it is restored only if you pass"
                f" extra={{{name!r}: object}} instead of a function"
            )
        return extra


@dataclass(frozen=True)
class CheckpointOptions:
    """Options of a checkpointed loop; `checkpointing` documents them."""

    every: int
    retention: Retention
    keep_history: bool
    base: str | None
    keyframe_every: int
    profile: Profile
    is_async: bool
    resume: bool
    on_commit: Callable[[Any], object] | None
    threads: int | None
    name: str = "step-{:08d}"
    """Format of the folder name of a step."""
    handles_sigterm: bool = True
    """Whether SIGTERM lets the next step save and exit."""
    sets_newer_aside: bool = False
    """Whether the first save moves checkpoints of later steps to another folder."""
    merges_folders: bool = False
    """Whether files that are already in the folder of a checkpoint become part of it."""
    stores_all_weights: bool = False
    """See `SaveOptions`."""
    pretrained: Pretrained | None = None
    remote: RemoteOptions | None = None
    """Where to upload checkpoints."""


class Checkpointing:
    """The checkpoints of a training loop; a context manager that locks the run folder."""

    def __init__(
        self,
        run: Path,
        objects: TrainingObjects,
        options: CheckpointOptions,
        *,
        start: int | None = None,
    ) -> None:
        self.run = run
        self.start = start or 0
        """Number of completed steps: the first step to run."""
        self.resumed: Checkpoint | None = None
        """The state from which the loop resumed, or None."""
        self.retention = options.retention
        """Rules for which checkpoints the next save keeps."""
        self._objects, self._options = objects, options
        self._is_restored = start is not None
        self._done = self.start
        self._pretrained = options.pretrained
        self._folder = LoopFolder(
            run, options.name, threads=options.threads, pretrained=options.pretrained
        )
        self._remote = None
        if options.remote is not None:
            self._remote = RemoteRun(options.remote, run, self._folder.is_own, options.retention)
        self._newest: Saved | None = None
        """The checkpoint of the last saved or resumed step."""
        self._has_saved = False
        self._files: Mapping[str, bytes] = {}
        """Additional files of the last saved step."""
        self._snapshot = Snapshot()
        self._pool: ThreadPoolExecutor | None = None
        """The thread that saves, while the run is locked."""
        self._saving: Future[Saved] | None = None
        self._is_terminating = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.run.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(lock_folder(self.run))
            remove_incomplete(self.run)
            if self._remote is not None:
                stack.enter_context(self._remote)
            for name, problem in find_unreadable(self.run).items():
                _log.warning(
                    "%s: unreadable checkpoint left as it is: %s", self.run / name, problem
                )
            self._resume()
            self._pool = ThreadPoolExecutor(1, "slimtensors-checkpoint")
            stack.callback(self._stop_thread, self._pool)
            self._handle_sigterm(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._stack:
            try:
                self.wait()
            except Exception as failure:
                if error is None:
                    raise
                error.add_note(f"the pending checkpoint was not saved either: {failure}")

    def step(
        self, step: int | None = None, *, epoch: int | None = None, **metrics: SupportsFloat
    ) -> Saved | None:
        """Count a completed training step, and save if a checkpoint is due.

        `step` is the number of completed steps, by default one more than before. Metrics are
        numbers, or tensors and arrays of one item. Return the result of the save, or None if there
        was none or it runs in the background.
        """
        check_metrics(metrics)
        completed = read_count("step", step)
        self._done = self._done + 1 if completed is None else completed
        if self._saving is not None and self._saving.done():
            self.wait()
        if self._is_terminating:
            self.save(epoch=epoch, **metrics)
            self.wait()
            raise SystemExit(128 + signal.SIGTERM)
        return self.save(epoch=epoch, **metrics) if self._done % self._options.every == 0 else None

    def save(self, *, epoch: int | None = None, **metrics: SupportsFloat) -> Saved | None:
        """Save now, whether a checkpoint is due or not.

        If the step was saved already, nothing is written, unless the metrics, the epoch or the
        additional files are new: then the checkpoint is replaced by one that has them too.
        """
        if self._pool is None:
            raise ConfigError("checkpointing(...) saves only inside of its with statement")
        check_metrics(metrics)
        numbers, epoch = read_metrics(metrics), read_count("epoch", epoch)
        files = self._objects.files() if self._objects.files else {}
        self.wait()
        old = self._newest
        if old and (old.manifest.step != self._done or not is_checkpoint(old.path)):
            old = None
        if old is not None:
            known = old.manifest
            is_new = any(repr(known.metrics.get(name)) != repr(x) for name, x in numbers.items())
            is_new |= self._has_saved and files != self._files
            if not is_new and epoch in (None, known.epoch):
                return old
            if not self._has_saved:
                _log.warning("%s: resumed from this step; new metrics are not stored", old.path)
                return old
            numbers = {**known.metrics, **numbers}
            epoch = known.epoch if epoch is None else epoch
        self._check_best(numbers)
        state = self._objects.build(self._done, epoch, numbers)
        self._files = files
        job = (self._done, files, old, self.retention)
        if not self._options.is_async:
            return self._write(FlatState.of(state), *job)
        self._saving = self._pool.submit(self._write, self._snapshot.take(state), *job)
        return None

    def wait(self) -> None:
        """Wait for the pending save, and raise its error if it failed."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(
        self,
        state: FlatState,
        step: int,
        files: Mapping[str, bytes],
        old: Saved | None,
        retention: Retention,
    ) -> Saved:
        """Save, and only then remove old checkpoints; `old` is a checkpoint to replace."""
        options = self._options
        if options.sets_newer_aside and not self._has_saved:
            self._folder.set_newer_aside(self.start, saving=step)
        save = SaveOptions(
            profile=options.profile,
            files=files,
            threads=options.threads,
            stores_all_weights=options.stores_all_weights,
            pretrained=self._pretrained,
        )
        if old is not None:
            path, base = old.path, old.manifest.base
            save = replace(save, base=self.run / base.name if base else None, merge=True)
            saved = save_with_base(state, self.run / path.name, save)
        else:
            path = self._folder.choose_path(step, merge=options.merges_folders)
            point = self._folder.choose_base(options.base, options.keyframe_every)
            merge = options.merges_folders and not is_checkpoint(path)
            save = replace(save, base=point.path if point else None, merge=merge)
            saved = save_with_base(state, path, save)
            self._folder.count_save(saved)
        if saved.unmatched and not self._has_saved and self._pretrained is not None:
            names = shorten_list(saved.unmatched)
            _log.info("%s: not in %s, stored without it: %s", path, self._pretrained.path, names)
        self._newest, self._has_saved = saved, True
        _log.info("%s", saved)
        path = self.run / saved.path.name
        if self._remote is not None:
            saved = self._remote.add(saved, retention)
        if isinstance(saved.path, Path):
            self._folder.apply_retention(retention, keep_history=options.keep_history)
        if self._remote is not None:
            self._remote.evict()
        if options.on_commit:
            options.on_commit(path if isinstance(saved.path, Path) else str(saved.path))
        return saved

    def _check_best(self, metrics: Mapping[str, float]) -> None:
        """Log a warning at the first save if the metric of `keep_best` is unknown."""
        best = self._options.retention.best
        if best is None or self._has_saved or best in metrics:
            return
        points = list_checkpoints(self.run)
        known = sorted({*metrics, *(name for point in points for name in point.manifest.metrics)})
        if best not in known:
            names = ", ".join(known) or "none"
            _log.warning("keep_best: no metric named %r so far; known metrics: %s", best, names)

    def _resume(self) -> None:
        points: Sequence[RunPoint] = select_resumable(list_checkpoints(self.run))
        if self._remote is not None:  # local ones are tried before remote ones of the same step
            both = [*select_resumable(self._remote.points()), *points]
            points = sorted(both, key=lambda point: point.order)
        if self._is_restored:  # by the caller, who passed `start`
            self._check_newest(points)
            return
        if points and not self._options.resume:
            raise ConfigError(
                f"{self.run} already contains {points[-1].name}; resume, or choose another folder"
            )
        for point in reversed(points):
            path = self.run / point.name
            try:
                if self._remote is not None and not isinstance(point, Point):
                    self._remote.fetch(point, self._folder.integrity)
                stored = StoredState(path, pretrained=self._pretrained_path)
                state = stored.load_state(threads=self._options.threads)
            except MissingBaseError:
                raise  # older checkpoints need it too
            except (FormatError, MismatchError) as error:
                _log.warning("%s: cannot resume, trying an older checkpoint: %s", point.path, error)
                self._folder.integrity.record(point, str(error))
                continue
            self._folder.integrity.record(point)
            self._adopt_pretrained(stored)
            self._objects.restore(state)
            self.resumed = state
            self._continue_from(Point(path, point.manifest))
            return
        self._check_unreadable(len(points))

    @property
    def _pretrained_path(self) -> StrPath | None:
        return self._pretrained.path if self._pretrained is not None else None

    def _adopt_pretrained(self, stored: StoredState) -> None:
        """Continue with the pretrained model of the checkpoint from which the loop resumes."""
        found = stored.find_pretrained() if self._pretrained is None else None
        if found is not None:
            _log.info("%s: continuing with the pretrained model in %s", self.run, found.path)
            self._pretrained = self._objects.open_pretrained(found.path)
            self._folder.use_pretrained(self._pretrained)

    def _continue_from(self, point: Point) -> None:
        self.start = self._done = point.manifest.step or 0
        points = select_resumable(list_checkpoints(self.run))
        self._folder.count_since_keyframe(points[: points.index(point) + 1])
        if self._folder.is_own(point):
            if self._remote is not None:
                self._remote.continue_from(point, self.retention)
            summary = inspect(point.path / STATE)
            self._newest = Saved(point.path, point.manifest, summary)

    def _check_unreadable(self, damaged: int) -> None:
        """Raise `FormatError` if there are checkpoints but none to resume from."""
        if not self._options.resume:
            return
        lost = [name for name in find_unreadable(self.run) if not name.startswith(DAMAGED)]
        count = damaged + sum(map(is_ours, (self.run / name for name in lost)))
        if count:
            raise FormatError(
                f"{self.run}: none of the {count} checkpoints can be read; repair them, or move"
                " them to another folder to start from the beginning"
            )

    def _check_newest(self, points: Sequence[RunPoint]) -> None:
        """Raise `ConfigError` if there are intact checkpoints of later steps than `start`."""
        newer = [point for point in points if (point.manifest.step or 0) > self.start]
        for point in reversed(newer):
            is_intact = isinstance(point, Point) and self._folder.integrity.is_intact(point)
            if not self._options.sets_newer_aside and is_intact:
                raise ConfigError(
                    f"{self.run} contains {point.name}, but training resumes from step"
                    f" {self.start}; remove the newer checkpoint first"
                )
        self._folder.count_since_keyframe([point for point in points if point not in newer])

    def _stop_thread(self, pool: ThreadPoolExecutor) -> None:
        pool.shutdown()
        self._pool = None

    def _handle_sigterm(self, stack: ExitStack) -> None:
        """Set a flag on SIGTERM unless a handler is installed."""
        is_main = threading.current_thread() is threading.main_thread()
        is_free = signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if not (self._options.handles_sigterm and is_main and is_free):
            return

        def set_flag(number: int, frame: FrameType | None) -> None:
            self._is_terminating = True

        signal.signal(signal.SIGTERM, set_flag)
        stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
