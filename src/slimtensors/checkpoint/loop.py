"""Checkpoints in a training loop: saved on the side, kept as told, resumed from the newest."""

import itertools
import logging
import signal
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from slimtensors.archive.tree import flatten
from slimtensors.archive.write import memory_view
from slimtensors.checkpoint.policy import Profile, find_profile
from slimtensors.checkpoint.run import (
    Point,
    Retention,
    demote,
    drop_incomplete,
    find_mentioned,
    find_unreadable,
    needed,
    next_base,
    points,
    resumable,
    saves_since_keyframe,
)
from slimtensors.checkpoint.state import Checkpoint, Stateful, build_checkpoint, restore_checkpoint
from slimtensors.checkpoint.store import FlatState, Saved, load_checkpoint, save_flat
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.storage import StrPath, local_path
from slimtensors.storage.atomic import lock_folder, remove_folder
from slimtensors.tensor import Spec, allocate, as_bytes, check_storable, to_cpu

_USUAL = {torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8}


class Snapshot:
    """Memory for one copy of a state, pinned where it comes from a CUDA device."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def take(self, state: Mapping[str, Any]) -> FlatState:
        """Copy all tensors of a state; what was taken before is overwritten."""
        found, tree = flatten(state)
        tensors = {name: check_storable(name, value) for name, value in found.items()}
        at = Counter(x.data_ptr() for x in tensors.values())
        copies: dict[object, Tensor] = {}
        taken: dict[str, Tensor] = {}
        todo: list[tuple[Tensor, Tensor]] = []
        for name, x in tensors.items():
            # What is tied stays tied; that most are not, their addresses tell sooner.
            key = memory_view(x) if at[x.data_ptr()] > 1 else name
            if key not in copies:
                copies[key] = self._room(name, x)
                todo.append((copies[key], x))
            taken[name] = copies[key]
        # After the loop: copying leaves nothing in the caches that it could use.
        _copy_all(todo)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._held = taken
        return FlatState(taken, tree, state)

    def _room(self, name: str, x: Tensor) -> Tensor:
        """Return memory for a copy: what was used before, if it still fits."""
        if x.is_quantized:
            return x.detach().cpu().clone()  # an empty one would lack the scales
        copy = self._held.get(name)
        if copy is None or copy.dtype != x.dtype or copy.shape != x.shape:
            return _pinned(x) if x.is_cuda else allocate(Spec.of(x))
        return copy


@torch.no_grad()
def _copy_all(todo: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy each second tensor into the first, the usual ones in one call: a state has hundreds."""
    usual = [pair for pair in todo if pair[1].dtype in _USUAL or pair[1].is_cuda]
    if usual:
        targets, sources = map(list, zip(*usual, strict=True))
        torch._foreach_copy_(targets, sources, non_blocking=True)
    for copy, x in todo:
        if not (x.dtype in _USUAL or x.is_cuda or x.is_quantized):
            as_bytes(copy).copy_(as_bytes(to_cpu(x)))  # as bytes: some dtypes have no copy kernel


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True)


_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingObjects:
    """The objects whose state is kept."""

    model: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Stateful | None = None
    scaler: Stateful | None = None
    dataloader: Stateful | None = None
    extra: Callable[[], Mapping[str, Any]] | None = None
    files: Callable[[], Mapping[str, bytes]] | None = None
    """Small files that go with each checkpoint."""

    def build(self, step: int, epoch: int | None, metrics: Mapping[str, float]) -> Checkpoint:
        """Return their state, by reference."""
        return build_checkpoint(
            self.model,
            self.optimizer,
            self.scheduler,
            self.scaler,
            dataloader=self.dataloader,
            step=step,
            epoch=epoch,
            metrics=metrics,
            extra=self.extra() if self.extra else None,
        )

    def restore(self, checkpoint: Checkpoint) -> None:
        """Put a state back."""
        restore_checkpoint(
            checkpoint,
            self.model,
            self.optimizer,
            self.scheduler,
            self.scaler,
            dataloader=self.dataloader,
        )


@dataclass(frozen=True)
class CheckpointOptions:
    """How a loop saves."""

    every: int
    retention: Retention
    keep_history: bool
    base: str | None
    keyframe_every: int
    profile: Profile
    is_async: bool
    resume: bool
    on_commit: Callable[[Path], object] | None
    threads: int | None
    name: str = "step-{:08d}"
    """Of the folder of a step."""


def checkpointing(
    run: StrPath,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scheduler: Stateful | None = None,
    scaler: Stateful | None = None,
    *,
    dataloader: Stateful | None = None,
    extra: Callable[[], Mapping[str, Any]] | None = None,
    every: int = 100,
    keep_last: int | None = None,
    keep_every: int | None = None,
    keep_best: str | None = None,
    best_is: str = "min",
    keep_history: bool = False,
    base: str | None = "auto",
    keyframe_every: int = 8,
    profile: str | Profile = "exact",
    async_: bool = True,
    resume: bool = True,
    on_commit: Callable[[Path], object] | None = None,
    threads: int | None = None,
) -> "Checkpointing":
    """Keep the state of a training loop in the folder `run`, and resume from what is there.

        with checkpointing("run", model, optimizer, every=100, keep_last=3) as ckpt:
            for step in range(ckpt.start, 10_000):
                ...
                ckpt.step(loss=loss.item())

    Checkpoints are stored as differences from the last one that stands alone, of which there is one
    in `keyframe_every` saves; with `base="chain"` from the one before, with `base=None` from none.
    `profile` says what may be rounded: by default nothing. What the `keep_…` options do not keep is
    removed, or with `keep_history` reduced to its weights in bf16.

    A step at which nothing is due costs nothing. When a save is due, the loop waits for the one
    before and for a copy of the state; another thread does the rest and then calls `on_commit` with
    the folder. What goes wrong there is raised by the next call. SIGTERM lets the next `step` save
    and then ends the program.
    """
    for name, value in (("every", every), ("keyframe_every", keyframe_every)):
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} must be a number from 1, got {value!r}")
    if base not in ("auto", "chain", None):
        raise ConfigError(f"base must be 'auto', 'chain' or None, got {base!r}")
    how = find_profile(profile)
    if how.is_model_only:
        raise ConfigError(f"profile {how.name!r} cannot be resumed from; use keep_history")
    return Checkpointing(
        local_path(run),
        TrainingObjects(model, optimizer, scheduler, scaler, dataloader, extra),
        CheckpointOptions(
            every=every,
            retention=Retention(keep_last, keep_every, keep_best, best_is),
            keep_history=keep_history,
            base=base,
            keyframe_every=keyframe_every,
            profile=how,
            is_async=async_,
            resume=resume,
            on_commit=on_commit,
            threads=threads,
        ),
    )


class Checkpointing:
    """A training loop's checkpoints, from entering the `with` block to leaving it."""

    def __init__(
        self,
        run: Path,
        trained: TrainingObjects,
        options: CheckpointOptions,
        *,
        start: int | None = None,
    ) -> None:
        self.run = run
        self.start = start or 0
        """Steps that were done before: where the loop goes on."""
        self.resumed: Checkpoint | None = None
        """The state that was resumed from."""
        self._trained, self._options = trained, options
        self._is_restored = start is not None
        self._done = self.start
        self._since = 0
        """Saves since the last one that stands alone."""
        self._snapshot = Snapshot()
        self._saving: Future[Saved] | None = None
        self._is_told_to_stop = False
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self.run.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            stack.enter_context(lock_folder(self.run))
            drop_incomplete(self.run)
            self._resume()
            self._pool = ThreadPoolExecutor(1, "slimtensors-checkpoint")
            stack.callback(self._pool.shutdown)
            self._listen(stack)
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
            except Exception as failed:
                if error is None:
                    raise
                error.add_note(f"and the checkpoint under way was not saved: {failed}")

    def step(
        self, step: int | None = None, *, epoch: int | None = None, **metrics: float
    ) -> Saved | None:
        """Count a training step that was done, and save if it is time to.

        `step` says how many were done; without it, one more than before. Return what was saved, if
        that was not left to another thread.
        """
        self._done = self._done + 1 if step is None else step
        if self._saving is not None and self._saving.done():
            self.wait()
        if self._is_told_to_stop:
            self.save(epoch=epoch, **metrics)
            self.wait()
            raise SystemExit(128 + signal.SIGTERM)
        return self.save(epoch=epoch, **metrics) if self._done % self._options.every == 0 else None

    def save(self, *, epoch: int | None = None, **metrics: float) -> Saved | None:
        """Save now, whether it is time or not."""
        self.wait()
        state = self._trained.build(self._done, epoch, metrics)
        files = self._trained.files() if self._trained.files else {}
        if not self._options.is_async:
            return self._write(FlatState.of(state), self._done, files)
        taken = self._snapshot.take(state)
        self._saving = self._pool.submit(self._write, taken, self._done, files)
        return None

    def wait(self) -> None:
        """Wait until the save under way is complete, and raise what went wrong with it."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _write(self, state: FlatState, step: int, files: Mapping[str, bytes]) -> Saved:
        """Save, then remove what need not be kept any more: never the other way round."""
        options = self._options
        base = next_base(points(self.run), options.base, self._since, options.keyframe_every)
        saved = save_flat(
            state,
            self._target(step),
            base=base.path if base else None,
            profile=options.profile,
            files=files,
            threads=options.threads,
        )
        self._since = self._since + 1 if base else 0
        _log.info("%s", saved)
        self._tidy()
        if options.on_commit:
            options.on_commit(saved.path)
        return saved

    def _target(self, step: int) -> Path:
        """Return the folder of a step, with a suffix if an unreadable checkpoint has that name."""
        usual = self._options.name.format(step)
        names = itertools.chain([usual], (f"{usual}-{i}" for i in itertools.count(2)))
        taken = find_unreadable(self.run)
        return next(self.run / name for name in names if name not in taken)

    def _tidy(self) -> None:
        found = points(self.run)
        keep = self._options.retention.kept(resumable(found))
        keep |= needed(find_mentioned(find_unreadable(self.run), self.run, found), found)
        # Newest first: a delta goes before what it needs, so that none is ever left without.
        for point in reversed(resumable(found)):
            if point.name in keep:
                continue
            if self._options.keep_history:
                demote(point, points(self.run), threads=self._options.threads)
            else:
                remove_folder(point.path)

    def _resume(self) -> None:
        found = resumable(points(self.run))
        if self._is_restored:  # by somebody else, from the point where we start
            self._check_newest(found)
            return
        if found and not self._options.resume:
            raise ConfigError(
                f"{self.run}: holds {found[-1].name}; resume, or choose another folder"
            )
        for point in reversed(found):
            try:
                state = load_checkpoint(point.path, threads=self._options.threads)
            except (FormatError, MismatchError) as error:
                _log.warning(
                    "%s: cannot be resumed from, trying an older one: %s", point.path, error
                )
                continue
            self._trained.restore(state)
            self.resumed = state
            self.start = self._done = point.manifest.step or 0
            self._since = saves_since_keyframe(found)
            return
        if found:
            raise FormatError(f"{self.run}: none of its {len(found)} checkpoints can be read")

    def _check_newest(self, found: Sequence[Point]) -> None:
        """Raise if checkpoints lie ahead of where training goes on."""
        newer = [point for point in found if (point.manifest.step or 0) > self.start]
        if newer:
            where = f"training goes on from step {self.start}"
            raise ConfigError(f"{self.run}: holds {newer[-1].name}, but {where}; remove it first")
        self._since = saves_since_keyframe(found)

    def _listen(self, stack: ExitStack) -> None:
        """Note a SIGTERM, unless the program has its own ways with it."""
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return

        def note(number: int, frame: FrameType | None) -> None:
            self._is_told_to_stop = True

        signal.signal(signal.SIGTERM, note)
        stack.callback(signal.signal, signal.SIGTERM, signal.SIG_DFL)
