"""Masks that hold while the Trainer trains."""

from contextlib import ExitStack
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from slimtensors.recipe.training.masks import StageMasks


class HoldMasks(TrainerCallback):
    """Holds masks from when training begins, after a checkpoint was restored, to its end."""

    def __init__(self, masks: StageMasks) -> None:
        self._masks = masks
        self._hooks = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Hold them through every step of the optimizer."""
        optimizer = getattr(parts["optimizer"], "optimizer", parts["optimizer"])
        self._hooks.enter_context(self._masks.during(optimizer))

    def close(self) -> None:
        """Let go."""
        self._hooks.close()
