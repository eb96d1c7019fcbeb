"""Train a model through one stage of a recipe."""

from collections.abc import Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass, field, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import SaveStrategy

from slimtensors.archive import load, save
from slimtensors.checkpoint import Point, load_checkpoint, points, restore_checkpoint
from slimtensors.errors import ConfigError, MismatchError, nearest
from slimtensors.recipe import Recipe, Stage
from slimtensors.recipe.modifiers import Distillation
from slimtensors.recipe.report import Report
from slimtensors.recipe.training import StageMasks, TrainingLength, answers_divergence, build_masks
from slimtensors.storage import StrPath, local_path
from slimtensors.transformers.data import Examples
from slimtensors.transformers.trainer import SlimCheckpoints


def arguments(given: Any, folder: Path) -> TrainingArguments:
    """Return arguments, from a mapping or from the Trainer's own, for a run in a folder."""
    if given is None:
        given = {}
    if isinstance(given, Mapping):
        known = {each.name for each in fields(TrainingArguments) if each.init}
        for name in given.keys() - known:
            raise ConfigError(f"training_args: there is no {name!r}; {nearest(str(name), known)}")
        is_cpu = not torch.accelerator.is_available()  # then torch warns, and bf16 is refused
        here = {"dataloader_pin_memory": not is_cpu, "use_cpu": is_cpu}
        given = TrainingArguments(**{**here, **given, "output_dir": str(folder)})
    if not isinstance(given, TrainingArguments):
        raise ConfigError(f"training_args: are a TrainingArguments or a mapping, not {given!r}")
    if given.save_strategy == SaveStrategy.BEST:
        raise ConfigError("save_strategy: is no, steps or epoch here")
    if given.load_best_model_at_end:
        raise ConfigError("load_best_model_at_end: the best model may not have its final masks yet")
    mine = copy(given)
    mine.output_dir = str(folder)
    return mine


def saving(args: TrainingArguments, steps: int, steps_per_epoch: int) -> dict[str, Any] | None:
    """Return what `SlimCheckpoints` is to do about what the arguments ask for; none if nothing."""
    if args.save_strategy == SaveStrategy.NO:
        return None
    every = float(steps_per_epoch)
    if args.save_strategy == SaveStrategy.STEPS:
        every = args.save_steps if args.save_steps >= 1 else args.save_steps * steps
    return {"every": max(1, round(every)), "keep_last": args.save_total_limit}


def without_saving(args: TrainingArguments) -> TrainingArguments:
    """Return arguments with which the Trainer itself saves nothing."""
    mine = copy(args)
    mine.save_strategy = SaveStrategy.NO
    return mine


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


@dataclass(frozen=True)
class TrainedStage:
    """How a stage was trained."""

    name: str
    steps: int
    seconds: float
    loss: float | None
    """The mean of all steps; none if nothing was left to train."""
    resumed_from: int = 0
    """Steps that were done before."""
    evaluation: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        loss = "-" if self.loss is None else f"{self.loss:.4f}"
        return f"{self.name}: {self.steps} steps in {self.seconds:.1f} s, loss {loss}"


@dataclass(frozen=True)
class TrainingReport(Report):
    """What was done to a model, in one shot and by training, and what has become of it."""

    stages: tuple[TrainedStage, ...] = ()
    """Those that were trained."""

    def __str__(self) -> str:
        return "\n".join([*map(str, self.stages), super().__str__()])


FOLDER = "checkpoints"
"""Of the output folder; in it, one per stage."""
_RECIPE, _MASKS = "recipe.yaml", "masks.safetensors"


@dataclass(frozen=True)
class Resumed:
    """A checkpoint to go on from."""

    stage: str
    point: Point

    @property
    def step(self) -> int:
        """Steps that were done."""
        return self.point.manifest.step or 0


def stage_folder(home: Path, stage: str) -> Path:
    """Return the folder of a stage's checkpoints."""
    return home / FOLDER / stage


def begin_run(folder: Path, recipe: Recipe, held: Mapping[str, Tensor]) -> None:
    """Note what a stage begins with, for a run that has to go on in it."""
    if old := _points(folder):
        raise ConfigError(f"{folder}: holds {old[-1].name}; resume, or choose another output_dir")
    folder.mkdir(parents=True, exist_ok=True)
    recipe.save(folder)
    if held:
        save(dict(held), folder / _MASKS)


def held_in(folder: Path) -> dict[str, Tensor]:
    """Return the masks that held when a stage began."""
    path = folder / _MASKS
    return dict(load(path)) if path.exists() else {}


def find_resume_point(home: Path, recipe: Recipe, given: StrPath | bool) -> Resumed:
    """Return the checkpoint that is meant: with True the newest; raise if another recipe's."""
    names = [stage.name for stage in recipe.stages]
    if given is True:
        begun = [name for name in names if _points(stage_folder(home, name))]
        if not begun:
            _check_recipe(home, recipe)
            raise ConfigError(f"{home / FOLDER}: there is no checkpoint to resume from")
        found = Resumed(begun[-1], _points(stage_folder(home, begun[-1]))[-1])
    else:
        path = local_path(given) if not isinstance(given, bool) else home
        each = {name: _points(stage_folder(home, name)) for name in names}
        at = [Resumed(n, p) for n, some in each.items() for p in some if _is_same(p.path, path)]
        if not at:
            _check_recipe(home, recipe)
            raise ConfigError(f"{path}: is no checkpoint of a stage in {home / FOLDER}")
        found = at[0]
    _check_recipe(home, recipe)
    return found


def _check_recipe(home: Path, recipe: Recipe) -> None:
    for path in sorted((home / FOLDER).glob(f"*/{_RECIPE}")):
        if Recipe.load(path) != recipe:
            raise MismatchError(
                f"{path.parent}: was trained by another recipe, which {path.name} tells; resume"
                " with that one, or choose another output_dir"
            )


def _points(folder: Path) -> list[Point]:
    return list(points(folder)) if folder.is_dir() else []


def _is_same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()


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
    masks = build_masks(model, stage.modifiers, held, length)
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


def _length(trainer: DistillingTrainer) -> TrainingLength:
    values = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    _, steps_per_epoch, _, _, _, _, steps = values
    return TrainingLength(steps, steps_per_epoch)


def _fit(
    trainer: DistillingTrainer, masks: StageMasks, length: TrainingLength, resumed: Resumed | None
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
