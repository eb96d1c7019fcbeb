"""The Trainer, with a teacher whose answers count for the loss."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Trainer

from slimtensors.recipe.modifiers import Distillation
from slimtensors.recipe.training import answers_divergence


@dataclass(frozen=True)
class Lesson:
    """A teacher, and how much is learned from it."""

    teacher: nn.Module
    how: Distillation


class DistillingTrainer(Trainer):
    """Trains on the task and, if there is a lesson, on what the teacher answers.

    What is evaluated is the task alone.
    """

    def __init__(self, *args: Any, lesson: Lesson | None = None, **options: Any) -> None:
        super().__init__(*args, **options)
        self._lesson = lesson
        if lesson is not None:
            lesson.teacher.to(self.args.device).eval().requires_grad_(False)
            self.loss_is_scaled_for_ga = False  # both losses are means of a batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss, mixed with the distance from the teacher's answers while training."""
        lesson = self._lesson
        if lesson is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with torch.no_grad():
            taught = lesson.teacher(**inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        distance = answers_divergence(
            outputs,
            taught,
            temperature=lesson.how.temperature,
            attention=inputs.get("attention_mask"),
        )
        share = lesson.how.hardness
        mixed = (1 - share) * loss + share * distance
        return (mixed, outputs) if return_outputs else mixed
