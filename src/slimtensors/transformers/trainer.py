"""Checkpoints for the Trainer of transformers: compressed, asynchronous and atomic."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from slimtensors.checkpoint import list_checkpoints, load_checkpoint
from slimtensors.checkpoint.loop import Checkpointing, CheckpointOptions, TrainingObjects
from slimtensors.checkpoint.loop_folder import RunIntegrity
from slimtensors.checkpoint.manifest import read_metrics
from slimtensors.checkpoint.profiles import Profile, find_profile
from slimtensors.checkpoint.run import Retention, select_resumable
from slimtensors.checkpoint.state import Stateful, restore_rng
from slimtensors.errors import ConfigError, FormatError, MismatchError


class SlimCheckpoints(TrainerCallback):
    """Trainer callback that saves compressed checkpoints for `resume_from_checkpoint`.

    Folders are named like the Trainer's own, `checkpoint-500`, and saved to its output folder. The
    Trainer itself must not save, because it would remove old checkpoints that newer ones need.
    Weights are restored when training begins; until then the Trainer reads an empty file and warns
    that all keys are missing.

    Args:
        every: steps between checkpoints.
        keep_last: number of latest checkpoints to keep; None keeps all.
        keep_every: also keep checkpoints whose step is a multiple of this.
        keep_best: also keep the checkpoint with the best value of this metric.
        best_is: `min` or `max`.
        base: `auto` saves differences from earlier checkpoints, None saves each in full.
        profile: precision of weights and optimizer state, as for `save_checkpoint`.
        async_: write in the background.
        parts: further objects with a state to save and restore, by name.

    Example:
        >>> args = TrainingArguments("run", save_strategy="no")
        >>> callbacks = [SlimCheckpoints(every=500, keep_last=2)]
        >>> trainer = Trainer(model, args, train_dataset=dataset, callbacks=callbacks)
        >>> trainer.train(resume_from_checkpoint=True)
    """

    def __init__(
        self,
        *,
        every: int = 500,
        keep_last: int | None = None,
        keep_every: int | None = None,
        keep_best: str | None = None,
        best_is: str = "min",
        base: str | None = "auto",
        profile: str | Profile = "exact",
        async_: bool = True,
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._parts = dict(parts or {})
        self._options = CheckpointOptions(
            every,
            Retention(keep_last, keep_every, keep_best, best_is),
            keep_history=False,
            base=base,
            keyframe_every=8,
            profile=find_profile(profile),
            is_async=async_,
            resume=True,
            on_commit=None,
            threads=None,
            name="checkpoint-{}",
        )
        self._loop: Checkpointing | None = None
        self._rng: Mapping[str, Any] | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **parts: Any,
    ) -> None:
        """Lock the folder, and restore the checkpoint of `resume_from_checkpoint`."""
        _check_arguments(args)
        self.close()
        objects = TrainingObjects(
            parts["model"],
            getattr(parts["optimizer"], "optimizer", parts["optimizer"]),
            parts["lr_scheduler"],
            extra=self._parts,
            files=lambda: _make_trainer_files(state),
        )
        run = Path(args.output_dir)
        if state.global_step:
            point = run / self._options.name.format(state.global_step)
            checkpoint = _load(point)
            for name in self._parts.keys() - checkpoint.keys():
                raise MismatchError(
                    f"{point}: no state of {name!r}; the checkpoint was saved without it"
                )
            objects.restore(checkpoint)
            self._rng = checkpoint["rng"]
        self._loop = Checkpointing(run, objects, self._options, start=state.global_step)
        self._loop.__enter__()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Restore the random state before shuffling, if the checkpoint is between two epochs."""
        if float(state.epoch or 0).is_integer():
            self._restore_rng()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Restore the random state after batches trained before the checkpoint are skipped."""
        self._restore_rng()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Save if a checkpoint is due."""
        assert self._loop is not None
        self._loop.step(state.global_step, epoch=int(state.epoch or 0), **_read_metrics(state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Wait for the last save, and release the folder."""
        self.close()

    def _restore_rng(self) -> None:
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def close(self) -> None:
        """Wait for a pending save, and release the folder."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.__exit__(None, None, None)


def _load(path: Path) -> dict[str, Any]:
    """Load a checkpoint; if it is damaged, name the newest one that is intact."""
    try:
        return load_checkpoint(path)
    except (FormatError, MismatchError) as error:
        integrity = RunIntegrity(path.parent)
        points = select_resumable(list_checkpoints(path.parent))
        intact = next((point for point in reversed(points) if integrity.is_intact(point)), None)
        advice = f"pass resume_from_checkpoint={str(intact.path)!r}" if intact else "none is intact"
        raise type(error)(f"{error}; {advice}") from error


def _check_arguments(args: TrainingArguments) -> None:
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
        raise ConfigError("SlimCheckpoints requires TrainingArguments(save_strategy='no')")
    if args.fp16:
        raise ConfigError(
            "SlimCheckpoints does not support fp16=True (its scaler is not saved); use bf16=True"
        )
    if args.world_size > 1:
        raise ConfigError(f"SlimCheckpoints supports one process, got {args.world_size}")


def _make_trainer_files(state: TrainerState) -> dict[str, bytes]:
    """Return the files that the Trainer requires in a folder to resume from it."""
    text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    return {TRAINER_STATE_NAME: text.encode(), SAFE_WEIGHTS_NAME: safetensors_bytes({})}


def _read_metrics(state: TrainerState) -> dict[str, float]:
    """Return the last logged value of each metric."""
    logged = {key: value for entry in state.log_history for key, value in entry.items()}
    return {key: x for key, x in read_metrics(logged).items() if key not in ("epoch", "step")}
