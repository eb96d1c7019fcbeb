"""Train a model through one stage of a recipe, with the Trainer of transformers."""

from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from slimtensors.checkpoint import Point, load_checkpoint, restore_checkpoint
from slimtensors.errors import ConfigError, suggest
from slimtensors.recipe import Stage
from slimtensors.recipe.modifiers import Distillation
from slimtensors.recipe.training import StageMasks, TrainingLength, answers_divergence, build_masks
from slimtensors.transformers.data import Examples
from slimtensors.transformers.trainer import CheckpointSettings, SlimTrainer

_MASKS = "masks"
"""Key of the masks in a checkpoint."""


@dataclass(frozen=True)
class TrainingSetup:
    """Arguments, data and teacher for all stages."""

    args: Any
    """A TrainingArguments, a mapping of some of them, or None."""
    tokenizer: Any
    data: Examples
    eval_data: Examples | None
    teacher: nn.Module | None


@dataclass(frozen=True)
class ResumePoint:
    """A checkpoint to resume from."""

    stage: str
    point: Point

    @property
    def step(self) -> int:
        """Number of steps trained before the checkpoint."""
        return self.point.manifest.step or 0


@dataclass(frozen=True)
class TrainedStage:
    """Result of training one stage."""

    name: str
    steps: int
    seconds: float
    loss: float | None
    """Mean over all steps; None if no step was left to train."""
    resumed_from: int = 0
    """Steps trained before the checkpoint that the run resumed from."""
    evaluation: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        return f"{self.name}: {self.steps} steps in {self.seconds:.1f} s, loss {loss}"


def train_stage(
    model: nn.Module,
    stage: Stage,
    setup: TrainingSetup,
    *,
    folder: Path,
    masks: Mapping[str, Tensor],
    resume: ResumePoint | None,
) -> tuple[StageMasks, TrainedStage]:
    """Train a model in place; return the final masks and a report.

    Args:
        model: model to train.
        stage: stage of the recipe.
        setup: arguments, data and teacher.
        folder: folder for checkpoints.
        masks: masks of weights that were pruned before this stage.
        resume: checkpoint to resume from.
    """
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    trainer = _build_trainer(model, stage, setup, folder)
    length = _measure_length(trainer)
    stage_masks = build_masks(model, stage.modifiers, masks, length)
    start = perf_counter()
    if resume is not None and resume.step >= length.steps:
        # The Trainer would take one more step.
        _restore(model, stage_masks, resume)
        loss = None
    else:
        loss = _fit(trainer, stage_masks, resume)
    seconds = perf_counter() - start
    stage_masks.check()
    model.eval()
    if use_cache is not None:
        config.use_cache = use_cache  # the Trainer turns it off; the saved model must have it on
    report = TrainedStage(
        stage.name,
        length.steps,
        seconds,
        loss,
        resume.step if resume else 0,
        _evaluate(trainer) if setup.eval_data is not None else {},
    )
    return stage_masks, report


def _build_trainer(
    model: nn.Module, stage: Stage, setup: TrainingSetup, folder: Path
) -> "DistillationTrainer":
    args = parse_arguments(setup.args, folder)
    data = setup.data
    args.per_device_train_batch_size = data.batch_size or args.per_device_train_batch_size
    args.train_sampling_strategy = data.sampling or args.train_sampling_strategy
    modifier = next((m for m in stage.modifiers if isinstance(m, Distillation)), None)
    return DistillationTrainer(
        model,
        args,
        train_dataset=data.rows,
        eval_dataset=setup.eval_data.rows if setup.eval_data else None,
        data_collator=data.collate,
        processing_class=setup.tokenizer,
        teacher=setup.teacher if modifier else None,
        distillation=modifier,
    )


def parse_arguments(args: Any, folder: Path) -> TrainingArguments:
    """Return a copy of the Trainer's arguments, or build them from a mapping, for a folder."""
    if args is None:
        args = {}
    if isinstance(args, Mapping):
        known = {each.name for each in fields(TrainingArguments) if each.init}
        for name in args.keys() - known:
            raise ConfigError(f"training_args: unknown key {name!r}; {suggest(str(name), known)}")
        # On a CPU, torch would warn about pinned memory, and bf16 would be refused.
        is_cpu = not torch.accelerator.is_available()
        defaults = {"dataloader_pin_memory": not is_cpu, "use_cpu": is_cpu}
        args = TrainingArguments(**{**defaults, **args, "output_dir": str(folder)})
    if not isinstance(args, TrainingArguments):
        raise ConfigError(f"training_args: expected TrainingArguments or a mapping, got {args!r}")
    if args.save_strategy == SaveStrategy.BEST:
        raise ConfigError("training_args: save_strategy must be no, steps or epoch, got best")
    if args.load_best_model_at_end:
        raise ConfigError(
            "training_args: load_best_model_at_end is not supported: the best model may not have"
            " its final masks yet"
        )
    result = copy(args)
    result.output_dir = str(folder)
    return result


class DistillationTrainer(SlimTrainer):
    """A Trainer that adds the distance from a teacher's outputs to the training loss.

    Evaluation uses the loss of the task alone.
    """

    def __init__(
        self,
        *args: Any,
        teacher: nn.Module | None = None,
        distillation: Distillation | None = None,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self._teacher, self._distillation = teacher, distillation
        if teacher is not None:
            teacher.to(self.args.device).eval().requires_grad_(False)
            self.loss_is_scaled_for_ga = False  # both losses are means of a batch

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Any = None,
    ) -> Any:
        """Return the loss, in training mixed with the distance from the teacher's outputs."""
        teacher, distillation = self._teacher, self._distillation
        if teacher is None or distillation is None or not model.training:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        with torch.no_grad():
            targets = teacher(**inputs)
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        distance = answers_divergence(
            outputs,
            targets,
            temperature=distillation.temperature,
            attention=inputs.get("attention_mask"),
        )
        mixed = (1 - distillation.hardness) * loss + distillation.hardness * distance
        return (mixed, outputs) if return_outputs else mixed


class MaskCallback(TrainerCallback):
    """Apply masks in every optimizer step, starting after a checkpoint is restored."""

    def __init__(self, masks: StageMasks) -> None:
        self._masks = masks
        self._hooks = ExitStack()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **parts: Any
    ) -> None:
        """Register hooks on the optimizer."""
        optimizer = getattr(parts["optimizer"], "optimizer", parts["optimizer"])
        self._hooks.enter_context(self._masks.during(optimizer))

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()


def _measure_length(trainer: DistillationTrainer) -> TrainingLength:
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    _, steps_per_epoch, _, _, _, _, steps = values
    return TrainingLength(steps, steps_per_epoch)


def _fit(trainer: DistillationTrainer, masks: StageMasks, resume: ResumePoint | None) -> float:
    """Train, and return the loss."""
    base = None if trainer.args.save_total_limit else "auto"
    trainer.checkpoints = CheckpointSettings(base, async_=True, extra={_MASKS: masks})
    callback = MaskCallback(masks)
    trainer.add_callback(callback)
    try:
        result = trainer.train(resume_from_checkpoint=str(resume.point.path) if resume else None)
    finally:
        callback.close()
    loss: float = result.training_loss
    return loss


def _evaluate(trainer: DistillationTrainer) -> dict[str, float]:
    """Return the metrics that do not depend on the speed of the machine."""
    metrics: dict[str, float] = trainer.evaluate()
    times = ("_runtime", "_per_second", "epoch")
    return {name: x for name, x in metrics.items() if not name.endswith(times)}


def _restore(model: nn.Module, masks: StageMasks, resume: ResumePoint) -> None:
    checkpoint = load_checkpoint(resume.point.path)
    restore_checkpoint(checkpoint, model, rng_state=False)
    masks.load_state_dict(checkpoint[_MASKS])
