"""Train a model by a recipe, with the Trainer of transformers."""

import os
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from slimtensors.archive import load, save
from slimtensors.checkpoint import Point, list_checkpoints
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.layerwise.allocation import fitting_layers
from slimtensors.layerwise.report import LayerReport
from slimtensors.recipe import ConstantPruning, Distillation, Modifier, Recipe, SmoothQuant, Stage
from slimtensors.recipe.modifiers import (
    PruningModifier,
    QuantizationModifier,
    TrainingModifier,
    resolve_ignore,
)
from slimtensors.recipe.oneshot import (
    apply_recipe,
    check_recipe,
    check_targets,
    find_unchanged,
)
from slimtensors.recipe.recipe import modifier_name
from slimtensors.recipe.report import REPORT_FILE, Report, Step
from slimtensors.recipe.training import key_by_parameter
from slimtensors.storage import (
    SINGLE,
    LocalLocation,
    StrPath,
    check_separate,
    install_model,
    local_path,
    temporary_folder,
    write_json,
)
from slimtensors.storage.atomic import move_files
from slimtensors.transformers.auto import load_model, load_tokenizer
from slimtensors.transformers.data import calibration_batches, load_examples
from slimtensors.transformers.oneshot import check_savable, save_model
from slimtensors.transformers.training_stage import (
    ResumePoint,
    TrainedStage,
    TrainingSetup,
    train_stage,
)

_CHECKPOINTS = "checkpoints"
"""Subfolder of the output folder that contains one folder of checkpoints per stage."""
_RECIPE, _MASKS = "recipe.yaml", "masks.safetensors"
"""Files in the checkpoint folder of a stage."""


@dataclass(frozen=True)
class TrainingReport(Report):
    """Report on a model that was trained by a recipe."""

    stages: tuple[TrainedStage, ...] = ()
    """The trained stages."""

    def __str__(self) -> str:
        return "\n".join([*map(str, self.stages), super().__str__()])


def train(
    model: nn.Module | StrPath,
    recipe: Any,
    dataset: Any,
    *,
    output_dir: StrPath = "output",
    save_compressed: bool = True,
    training_args: Any = None,
    teacher: nn.Module | StrPath | None = None,
    eval_dataset: Any = None,
    tokenizer: Any = None,
    resume_from_checkpoint: StrPath | bool | None = None,
) -> tuple[Any, TrainingReport]:
    """Train a model by a recipe, save it, and return it with a report.

    Pruned weights stay zero in every step; if one is not zero at the end, `MismatchError` is
    raised.

    Args:
        model: module, changed in place; or a folder, dense or compressed, or a model name.
        recipe: modifiers, stages, YAML, or the path of a YAML file.
        dataset: dataset of the Trainer, DataLoader, texts, or a local file of texts.
        output_dir: folder for the model, `recipe.yaml`, `report.json` and checkpoints.
        save_compressed: save in the format that suits the model; False saves dense weights.
        training_args: TrainingArguments, or a mapping of some of them. `save_steps` sets how often
            a checkpoint is saved in `output_dir/checkpoints`.
        teacher: teacher for distillation; by default a copy of the model before training.
        eval_dataset: dataset to evaluate each trained stage on.
        tokenizer: tokenizer for texts; by default that of the folder.
        resume_from_checkpoint: path of a checkpoint, or True for the latest. The resumed run gives
            the same bits as an uninterrupted one.

    Example:
        >>> from slimtensors.recipe import GradualMagnitudePruning
        >>> from slimtensors.transformers import train
        >>> recipe = [GradualMagnitudePruning(0.8, targets=["re:.*mlp"])]
        >>> model, report = train("my-model", recipe, "text.txt", output_dir="my-sparse-model")
        >>> print(report)
    """
    parsed = Recipe.of(recipe)
    plan = plan_stages(parsed)
    home = local_path(output_dir)
    if isinstance(model, str | os.PathLike):
        check_separate(LocalLocation(home), [model])
    resume = (
        find_resume_point(home, parsed, resume_from_checkpoint) if resume_from_checkpoint else None
    )
    loaded = load_model(model)
    tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
    setup = TrainingSetup(
        training_args,
        tokenizer,
        load_examples(dataset, loaded, tokenizer),
        None if eval_dataset is None else load_examples(eval_dataset, loaded, tokenizer),
        _load_teacher(parsed, loaded, teacher),
    )
    run = _Run(loaded, parsed, home, setup)
    run.check_plan(plan, save_compressed=save_compressed)
    for planned in plan:
        if resume is None or planned.stage.name == resume.stage:
            run.run_stage(planned, resume)
            resume = None
    run.apply([modifier for planned in plan for modifier in planned.quantizing])
    run.check_masks()
    return loaded, _save(run, save_compressed=save_compressed)


@dataclass(frozen=True)
class PlannedStage:
    """A stage, and whether it is trained."""

    stage: Stage
    is_trained: bool

    @property
    def pruning(self) -> tuple[Modifier, ...]:
        """Modifiers that prune in one shot, before the stage is trained."""
        kinds = PruningModifier if self.is_trained else PruningModifier | ConstantPruning
        return tuple(m for m in self.stage.modifiers if isinstance(m, kinds))

    @property
    def quantizing(self) -> tuple[Modifier, ...]:
        """Modifiers that quantize, after all stages."""
        return tuple(
            m for m in self.stage.modifiers if isinstance(m, QuantizationModifier | SmoothQuant)
        )


def plan_stages(recipe: Recipe) -> list[PlannedStage]:
    """Return the stages and which of them are trained; by default, the first one.

    Raise `ConfigError` if a model would be trained after it was quantized.
    """
    trained = [stage.name for stage in recipe.stages if _needs_training(stage)]
    if not trained:
        trained = [stage.name for stage in recipe.stages if stage.run_type is None][:1]
    if not trained:
        raise ConfigError("no stage of the recipe needs training; use oneshot")
    plan = [PlannedStage(stage, stage.name in trained) for stage in recipe.stages]
    quantized = ""
    for planned in plan:
        if quantized and (planned.is_trained or planned.pruning):
            raise ConfigError(
                f"stage {planned.stage.name} follows stage {quantized}, which quantizes; training"
                " or pruning would change quantized weights, so quantize last"
            )
        quantized = planned.stage.name if planned.quantizing else quantized
    return plan


def _needs_training(stage: Stage) -> bool:
    training = [modifier_name(m) for m in stage.modifiers if isinstance(m, TrainingModifier)]
    if stage.run_type == "oneshot":
        if training:
            raise ConfigError(
                f"{training[0]} needs training, but stage {stage.name} has run_type oneshot"
            )
        return False
    is_constant = any(isinstance(m, ConstantPruning) for m in stage.modifiers)
    return bool(training) or is_constant or stage.run_type == "train"


@dataclass
class _Run:
    """State of a run: the model, its masks and the steps so far."""

    model: Any
    recipe: Recipe
    home: Path
    setup: TrainingSetup
    masks: dict[str, Tensor] = field(default_factory=dict)
    """Masks of all weights pruned so far; True for weights that are kept."""
    steps: list[Step] = field(default_factory=list)
    stages: list[TrainedStage] = field(default_factory=list)

    def check_plan(self, plan: Sequence[PlannedStage], *, save_compressed: bool) -> None:
        """Raise for errors in one-shot modifiers before training starts."""
        modifiers = [m for planned in plan for m in (*planned.pruning, *planned.quantizing)]
        if modifiers:
            check_recipe(_make_recipe(modifiers), has_data=True)
            check_targets(_make_recipe(modifiers), self.model)
        if isinstance(self.model, PreTrainedModel):
            check_savable(self.model, self.recipe, save_compressed=save_compressed)

    def run_stage(self, planned: PlannedStage, resume: ResumePoint | None) -> None:
        """Prune and train as a stage requires."""
        if resume is None:
            self.apply(planned.pruning)
        if planned.is_trained:
            self._train(planned.stage, resume)

    def apply(self, modifiers: Sequence[Modifier]) -> None:
        """Prune or quantize without training, and keep the masks of pruned weights."""
        if not modifiers:
            return
        batches = calibration_batches(self.setup.data, self.model, self.setup.tokenizer)
        self.steps += apply_recipe(self.model, _make_recipe(modifiers), batches)
        for modifier in modifiers:
            if isinstance(modifier, PruningModifier | ConstantPruning):
                ignore = resolve_ignore(self.model, modifier.ignore)
                layers = fitting_layers(self.model, modifier.targets, ignore)
                for name, layer in key_by_parameter(layers.values()).items():
                    self.masks[name] = layer.parameter.detach() != 0

    def _train(self, stage: Stage, resume: ResumePoint | None) -> None:
        folder = _stage_folder(self.home, stage.name)
        if resume is None:
            _start_stage(folder, self.recipe, self.masks)
        else:
            self.masks = _load_masks(folder)
            earlier = [LayerReport(name.removesuffix(".weight"), "") for name in self.masks]
            self.steps.append(Step("before the checkpoint", tuple(earlier)))
        masks, trained = train_stage(
            self.model, stage, self.setup, folder=folder, masks=self.masks, resume=resume
        )
        self.masks |= masks.masks
        self.steps += masks.steps
        self.stages.append(trained)

    def check_masks(self) -> None:
        """Raise `MismatchError` if a pruned weight is not zero."""
        for name, mask in self.masks.items():
            weight = self.model.get_parameter(name).detach()
            count = int(weight[~mask.to(weight.device)].count_nonzero())
            if count:
                raise MismatchError(f"{name}: {count} pruned weights are not zero")

    def make_report(self) -> TrainingReport:
        """Return the report on the model in its current state."""
        report = Report.of(self.model, self.steps)
        return TrainingReport(
            report.steps,
            report.layers,
            stages=tuple(self.stages),
            unchanged=find_unchanged(self.model, self.recipe, self.steps),
        )


def _make_recipe(modifiers: Sequence[Modifier]) -> Recipe:
    return Recipe((Stage(tuple(modifiers)),))


def _load_teacher(
    recipe: Recipe, model: nn.Module, teacher: nn.Module | StrPath | None
) -> nn.Module | None:
    """Return the teacher, or None if the recipe has no distillation."""
    modifiers = [m for m in recipe.modifiers if isinstance(m, Distillation)]
    if not modifiers:
        return None
    if teacher is None:
        teacher = next((m.teacher for m in modifiers if m.teacher), None)
    loaded: nn.Module = deepcopy(model) if teacher is None else load_model(teacher)
    return loaded


def _save(run: _Run, *, save_compressed: bool) -> TrainingReport:
    """Write the model, its recipe and its report to the output folder; return the report."""
    with temporary_folder(run.home / SINGLE) as folder:
        if isinstance(run.model, PreTrainedModel):
            report = save_model(
                run.model, folder, run.recipe, run.make_report(), save_compressed=save_compressed
            )
            if run.setup.tokenizer is not None:
                run.setup.tokenizer.save_pretrained(folder)
        else:
            report = _save_module(run, folder, "sparse" if save_compressed else "dense")
        install_model(folder, run.home)
        move_files(folder, run.home)
    return report


def _save_module(run: _Run, folder: Path, preset: str) -> TrainingReport:
    """Write a module that is not a model of transformers."""
    summary = save(run.model.state_dict(), folder / SINGLE, preset=preset)
    report = run.make_report().stored_as(preset, summary)
    run.recipe.save(folder)
    write_json(folder / REPORT_FILE, report.to_json())
    return report


def _stage_folder(home: Path, stage: str) -> Path:
    return home / _CHECKPOINTS / stage


def _start_stage(folder: Path, recipe: Recipe, masks: Mapping[str, Tensor]) -> None:
    """Write the recipe and the initial masks of a stage, for a run that resumes in it."""
    if old := _list_points(folder):
        raise ConfigError(
            f"{folder} already contains {old[-1].name}; resume, or choose another output_dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    recipe.save(folder)
    if masks:
        save(dict(masks), folder / _MASKS)


def _load_masks(folder: Path) -> dict[str, Tensor]:
    """Return the initial masks of a stage."""
    path = folder / _MASKS
    return dict(load(path)) if path.exists() else {}


def find_resume_point(home: Path, recipe: Recipe, checkpoint: StrPath | bool) -> ResumePoint:
    """Return the checkpoint to resume from, the latest for True; raise if the recipe differs."""
    names = [stage.name for stage in recipe.stages]
    found = [(name, point) for name in names for point in _list_points(_stage_folder(home, name))]
    _check_same_recipe(home, recipe)
    if checkpoint is True:
        if not found:
            raise ConfigError(f"{home / _CHECKPOINTS}: no checkpoint to resume from")
        return ResumePoint(*found[-1])
    path = (local_path(checkpoint) if not isinstance(checkpoint, bool) else home).resolve()
    for name, point in found:
        if point.path.resolve() == path:
            return ResumePoint(name, point)
    raise ConfigError(f"{path} is not a checkpoint of a stage in {home / _CHECKPOINTS}")


def _check_same_recipe(home: Path, recipe: Recipe) -> None:
    for path in sorted((home / _CHECKPOINTS).glob(f"*/{_RECIPE}")):
        if Recipe.load(path) != recipe:
            raise MismatchError(
                f"{path.parent} was trained by another recipe; resume with {path}, or choose"
                " another output_dir"
            )


def _list_points(folder: Path) -> list[Point]:
    return list(list_checkpoints(folder)) if folder.is_dir() else []
