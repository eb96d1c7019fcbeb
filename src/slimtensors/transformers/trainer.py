"""transformers' Trainer: its checkpoints, small, written on the side and whole or not at all."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save as safetensors_bytes
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.utils import SAFE_WEIGHTS_NAME

from slimtensors.checkpoint import load_checkpoint
from slimtensors.checkpoint.loop import Checkpointing, CheckpointOptions, TrainingObjects
from slimtensors.checkpoint.policy import Profile, find_profile
from slimtensors.checkpoint.run import Retention
from slimtensors.checkpoint.state import Stateful, restore_rng
from slimtensors.errors import ConfigError, MismatchError


class SlimCheckpoints(TrainerCallback):
    """Save a Trainer's state into its output folder; `resume_from_checkpoint` finds it there.

        args = TrainingArguments("run", save_strategy="no")
        trainer = Trainer(model, args, callbacks=[SlimCheckpoints(every=500, keep_last=2)], …)
        trainer.train(resume_from_checkpoint=True)

    The folders are called `checkpoint-500`, as the Trainer's own. It must not save itself, because
    it would remove the oldest, whether others need it or not. Its weights come back when training
    begins: until then it finds an empty file and says that all keys are missing. `parts` are other
    objects with a state that is saved and restored, by names of theirs.
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
        """Take the lock of the folder, and restore what `resume_from_checkpoint` asks for."""
        _check(args)
        self.close()
        trained = TrainingObjects(
            parts["model"],
            getattr(parts["optimizer"], "optimizer", parts["optimizer"]),
            parts["lr_scheduler"],
            extra=lambda: {name: part.state_dict() for name, part in self._parts.items()},
            files=lambda: _trainer_files(state),
        )
        run = Path(args.output_dir)
        if state.global_step:
            point = run / self._options.name.format(state.global_step)
            checkpoint = load_checkpoint(point)
            for name in self._parts.keys() - checkpoint.keys():
                raise MismatchError(f"{point}: holds no state of the {name}; it was saved without")
            trained.restore(checkpoint)
            for name, part in self._parts.items():
                part.load_state_dict(checkpoint[name])
            self._rng = checkpoint["rng"]
        self._loop = Checkpointing(run, trained, self._options, start=state.global_step)
        self._loop.__enter__()

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Restore random numbers before an epoch is shuffled, if it was saved between two."""
        if float(state.epoch or 0).is_integer():
            self._restore_rng()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Restore random numbers once the batches that were seen are skipped."""
        self._restore_rng()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Save if it is time to."""
        assert self._loop is not None
        self._loop.step(state.global_step, epoch=int(state.epoch or 0), **_metrics(state))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Wait for the last save, and let go of the folder."""
        self.close()

    def _restore_rng(self) -> None:
        if self._rng is not None:
            restore_rng(self._rng)
            self._rng = None

    def close(self) -> None:
        """Wait for the save under way, and let go of the folder."""
        loop, self._loop = self._loop, None
        if loop is not None:
            loop.__exit__(None, None, None)


def _check(args: TrainingArguments) -> None:
    if str(getattr(args.save_strategy, "value", args.save_strategy)) != "no":
        raise ConfigError("SlimCheckpoints saves itself: use TrainingArguments(save_strategy='no')")
    if args.fp16:
        raise ConfigError("SlimCheckpoints cannot see the scaler of fp16=True; use bf16=True")
    if args.world_size > 1:
        raise ConfigError("SlimCheckpoints saves one process; this run has several")


def _trainer_files(state: TrainerState) -> dict[str, bytes]:
    """Return what the Trainer must find in a folder to resume from it."""
    text = json.dumps(asdict(state), indent=2, sort_keys=True) + "\n"
    return {TRAINER_STATE_NAME: text.encode(), SAFE_WEIGHTS_NAME: safetensors_bytes({})}


def _metrics(state: TrainerState) -> dict[str, float]:
    """Return what was logged last under each name."""
    logged = {key: value for entry in state.log_history for key, value in entry.items()}
    numbers = {key: value for key, value in logged.items() if isinstance(value, int | float)}
    return {key: value for key, value in numbers.items() if key not in ("epoch", "step")}
