"""Train a model through one stage of a recipe."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from torch import Tensor, nn

from slimtensors.checkpoint import load_checkpoint, restore_checkpoint
from slimtensors.integrations.trainer import SlimCheckpoints
from slimtensors.integrations.training.arguments import arguments, saving, without_saving
from slimtensors.integrations.training.data import Examples
from slimtensors.integrations.training.distilling import DistillingTrainer, Lesson
from slimtensors.integrations.training.holding import HoldMasks
from slimtensors.integrations.training.report import TrainedStage
from slimtensors.integrations.training.resuming import Resumed
from slimtensors.recipe import Stage
from slimtensors.recipe.modifiers import Distillation
from slimtensors.recipe.training.masks import Length, StageMasks, masks_of

_MASKS = "masks"
"""The part of a checkpoint that holds those of a stage."""


@dataclass(frozen=True)
class Setup:
    """What all stages are trained with."""

    args: Any
    tokenizer: Any
    data: Examples
    held_out: Examples | None
    teacher: nn.Module | None


def train_stage(
    model: nn.Module,
    stage: Stage,
    setup: Setup,
    *,
    folder: Path,
    held: Mapping[str, Tensor],
    resumed: Resumed | None,
) -> tuple[StageMasks, TrainedStage]:
    """Train in place; return the masks that hold in the end, and what was done.

    `held` are the masks that the stage begins with, `folder` is for checkpoints.
    """
    config: Any = getattr(model, "config", None)
    use_cache = getattr(config, "use_cache", None)
    trainer = _trainer(model, stage, setup, folder)
    length = _length(trainer)
    masks = masks_of(model, stage.modifiers, held, length)
    start = perf_counter()
    if resumed is not None and resumed.step >= length.steps:
        # The Trainer would take one more step.
        _restore(model, masks, resumed)
        loss = None
    else:
        loss = _fit(trainer, masks, length, resumed)
    seconds = perf_counter() - start
    masks.check()
    model.eval()
    if use_cache is not None:
        config.use_cache = use_cache  # the Trainer turns it off, which is not for the saved model
    report = TrainedStage(
        stage.name,
        length.steps,
        seconds,
        loss,
        resumed.step if resumed else 0,
        _evaluated(trainer) if setup.held_out is not None else {},
    )
    return masks, report


def _trainer(model: nn.Module, stage: Stage, setup: Setup, folder: Path) -> DistillingTrainer:
    args = arguments(setup.args, folder)
    data = setup.data
    args.per_device_train_batch_size = data.batch_size or args.per_device_train_batch_size
    args.train_sampling_strategy = data.sampling or args.train_sampling_strategy
    how = next((m for m in stage.modifiers if isinstance(m, Distillation)), None)
    return DistillingTrainer(
        model,
        args,
        train_dataset=data.rows,
        eval_dataset=setup.held_out.rows if setup.held_out else None,
        data_collator=data.collate,
        processing_class=setup.tokenizer,
        lesson=Lesson(setup.teacher, how) if how and setup.teacher is not None else None,
    )


def _length(trainer: DistillingTrainer) -> Length:
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    _, steps_per_epoch, _, _, _, _, steps = values
    return Length(steps, steps_per_epoch)


def _fit(
    trainer: DistillingTrainer, masks: StageMasks, length: Length, resumed: Resumed | None
) -> float:
    """Train, and return the loss."""
    options = saving(trainer.args, length.steps, length.steps_per_epoch)
    callbacks: list[SlimCheckpoints | HoldMasks] = [HoldMasks(masks)]
    if options is not None:  # first, because what holds comes from the checkpoint
        callbacks.insert(0, SlimCheckpoints(**options, parts={_MASKS: masks}))
    trainer.args = without_saving(trainer.args)
    for callback in callbacks:
        trainer.add_callback(callback)
    try:
        done = trainer.train(resume_from_checkpoint=str(resumed.point.path) if resumed else None)
    finally:
        for callback in callbacks:
            callback.close()
    loss: float = done.training_loss
    return loss


def _evaluated(trainer: DistillingTrainer) -> dict[str, float]:
    """Return what does not depend on how fast the machine is."""
    found: dict[str, float] = trainer.evaluate()
    times = ("_runtime", "_per_second", "epoch")
    return {name: x for name, x in found.items() if not name.endswith(times)}


def _restore(model: nn.Module, masks: StageMasks, resumed: Resumed) -> None:
    checkpoint = load_checkpoint(resumed.point.path)
    restore_checkpoint(checkpoint, model, rng_state=False)
    masks.load_state_dict(checkpoint[_MASKS])
