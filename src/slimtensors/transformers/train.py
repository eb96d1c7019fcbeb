"""Train a model by a recipe, with the Trainer of transformers."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from slimtensors.archive import save
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.layerwise.allocation import fitting_layers
from slimtensors.layerwise.report import LayerReport
from slimtensors.recipe import ConstantPruning, Distillation, Modifier, Recipe, SmoothQuant, Stage
from slimtensors.recipe.modifiers import (
    PruningModifier,
    QuantizationModifier,
    TrainingModifier,
)
from slimtensors.recipe.oneshot import apply_recipe, check_recipe, check_targets
from slimtensors.recipe.recipe import modifier_name
from slimtensors.recipe.report import FILE, Report, Step
from slimtensors.recipe.training import key_by_parameter
from slimtensors.storage import SINGLE, StrPath, local_path, write_json
from slimtensors.transformers.auto import load_model, load_tokenizer
from slimtensors.transformers.data import calibration_batches, load_examples
from slimtensors.transformers.oneshot import save_model
from slimtensors.transformers.stage import (
    Resumed,
    Setup,
    TrainedStage,
    TrainingReport,
    begin_run,
    find_resume_point,
    held_in,
    stage_folder,
    train_stage,
)


@dataclass(frozen=True)
class StagePlan:
    """A stage, and whether it is trained."""

    stage: Stage
    is_trained: bool

    @property
    def pruning(self) -> tuple[Modifier, ...]:
        """Those that prune in one shot, before the stage is trained if it is."""
        kinds = PruningModifier if self.is_trained else PruningModifier | ConstantPruning
        return tuple(m for m in self.stage.modifiers if isinstance(m, kinds))

    @property
    def quantizing(self) -> tuple[Modifier, ...]:
        """Those that quantize, after everything else."""
        return tuple(
            m for m in self.stage.modifiers if isinstance(m, QuantizationModifier | SmoothQuant)
        )


def plan_stages(recipe: Recipe) -> list[StagePlan]:
    """Return the stages and which of them train; if none says so, the first does.

    Raise if a model would be trained after it was quantized.
    """
    trained = [stage.name for stage in recipe.stages if _says_train(stage)]
    if not trained:
        trained = [stage.name for stage in recipe.stages if stage.run_type is None][:1]
    if not trained:
        raise ConfigError("no stage of the recipe is to be trained; use oneshot")
    plan = [StagePlan(stage, stage.name in trained) for stage in recipe.stages]
    quantized = ""
    for each in plan:
        if quantized and (each.is_trained or each.pruning):
            raise ConfigError(
                f"the stage {each.stage.name} comes after {quantized}, which quantizes: weights"
                " would leave their grid; quantize last"
            )
        quantized = each.stage.name if each.quantizing else quantized
    return plan


def _says_train(stage: Stage) -> bool:
    needing = [modifier_name(m) for m in stage.modifiers if isinstance(m, TrainingModifier)]
    if stage.run_type == "oneshot":
        if needing:
            raise ConfigError(f"{needing[0]} needs training, but {stage.name} is to be oneshot")
        return False
    holds = any(isinstance(m, ConstantPruning) for m in stage.modifiers)
    return bool(needing) or holds or stage.run_type == "train"


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
    """Train a model by a recipe, write it to a folder, and return it with a report.

    `model` is changed in place, or loaded from a folder, compressed or not, or by name. `recipe`
    is modifiers, stages, YAML, or the path of a YAML file. `dataset` is what the Trainer takes, a
    DataLoader, texts, or a local file of them. `training_args` are the Trainer's own or a mapping
    of some; their `save_steps` says how often a checkpoint is saved, in `output_dir/checkpoints`,
    from which `resume_from_checkpoint=True` goes on bit for bit. A teacher is by default the model
    as it comes in. Masks hold through every step; whatever was pruned is zero in the end, or this
    raises.
    """
    made = Recipe.of(recipe)
    plan = plan_stages(made)
    home = local_path(output_dir)
    resumed = (
        find_resume_point(home, made, resume_from_checkpoint) if resume_from_checkpoint else None
    )
    module = load_model(model)
    words = tokenizer if tokenizer is not None else load_tokenizer(model)
    setup = Setup(
        training_args,
        words,
        load_examples(dataset, module, words),
        None if eval_dataset is None else load_examples(eval_dataset, module, words),
        _teacher(made, module, teacher),
    )
    run = _Run(module, made, home, setup)
    run.check_plan(plan)
    for each in plan:
        if resumed is None or each.stage.name == resumed.stage:
            run.do(each, resumed)
            resumed = None
    run.do_at_once([modifier for each in plan for modifier in each.quantizing])
    run.check()
    return module, _saved(run, save_compressed=save_compressed)


@dataclass
class _Run:
    """A model on its way through the stages of a recipe."""

    model: Any
    recipe: Recipe
    home: Path
    setup: Setup
    held: dict[str, Tensor] = field(default_factory=dict)
    """The masks of all weights that were pruned so far."""
    steps: list[Step] = field(default_factory=list)
    stages: list[TrainedStage] = field(default_factory=list)

    def check_plan(self, plan: Sequence[StagePlan]) -> None:
        """Raise now for what would raise only after training."""
        modifiers = [m for each in plan for m in (*each.pruning, *each.quantizing)]
        if modifiers:
            check_recipe(_only(modifiers), has_data=True)
            check_targets(_only(modifiers), self.model)

    def do(self, each: StagePlan, resumed: Resumed | None) -> None:
        """Prune and train, whatever of that a stage says."""
        if resumed is None:
            self.do_at_once(each.pruning)
        if each.is_trained:
            self._train(each.stage, resumed)

    def check(self) -> None:
        """Raise if a weight that was pruned is not zero."""
        for name, mask in self.held.items():
            weight = self.model.get_parameter(name).detach()
            broken = int(weight[~mask.to(weight.device)].count_nonzero())
            if broken:
                raise MismatchError(f"{name}: {broken} weights that were pruned are not zero")

    def do_at_once(self, modifiers: Sequence[Modifier]) -> None:
        """Prune or quantize without training, and hold what is zero then."""
        if not modifiers:
            return
        batches = calibration_batches(self.setup.data, self.model, self.setup.tokenizer)
        self.steps += apply_recipe(self.model, _only(modifiers), batches)
        for modifier in modifiers:
            if isinstance(modifier, PruningModifier | ConstantPruning):
                layers = fitting_layers(self.model, modifier.targets, modifier.ignore)
                for name, layer in key_by_parameter(layers.values()).items():
                    self.held[name] = layer.parameter.detach() != 0

    def _train(self, stage: Stage, resumed: Resumed | None) -> None:
        folder = stage_folder(self.home, stage.name)
        if resumed is None:
            begin_run(folder, self.recipe, self.held)
        else:
            self.held = held_in(folder)
            earlier = [LayerReport(name.removesuffix(".weight"), "") for name in self.held]
            self.steps.append(Step("before the checkpoint", tuple(earlier)))
        masks, done = train_stage(
            self.model, stage, self.setup, folder=folder, held=self.held, resumed=resumed
        )
        self.held |= masks.masks
        self.steps += masks.steps
        self.stages.append(done)

    def report(self) -> TrainingReport:
        """Tell what was done."""
        found = Report.of(self.model, self.steps)
        return TrainingReport(found.steps, found.layers, stages=tuple(self.stages))


def _only(modifiers: Sequence[Modifier]) -> Recipe:
    return Recipe((Stage(tuple(modifiers)),))


def _teacher(
    recipe: Recipe, model: nn.Module, given: nn.Module | StrPath | None
) -> nn.Module | None:
    """Return who is learned from, if the recipe has such a thing."""
    asked = [m for m in recipe.modifiers if isinstance(m, Distillation)]
    if not asked:
        return None
    named = next((m.teacher for m in asked if m.teacher), None)
    chosen = given if given is not None else named
    teacher: nn.Module = deepcopy(model) if chosen is None else load_model(chosen)
    return teacher


def _saved(run: _Run, *, save_compressed: bool) -> TrainingReport:
    """Write the model, its recipe and its report beside the checkpoints, and return the report."""
    with TemporaryDirectory(prefix=".", dir=run.home) as beside:
        folder = Path(beside, "model")
        folder.mkdir()
        if isinstance(run.model, PreTrainedModel):
            report = save_model(
                run.model, folder, run.recipe, run.report(), save_compressed=save_compressed
            )
            if run.setup.tokenizer is not None:
                run.setup.tokenizer.save_pretrained(folder)
        else:
            report = _save_plain(run, folder, "sparse" if save_compressed else "dense")
        for old in run.home.glob("*.safetensors*"):
            old.unlink()  # of an older model, perhaps in other shards
        for path in folder.iterdir():
            path.replace(run.home / path.name)
    return report


def _save_plain(run: _Run, folder: Path, preset: str) -> TrainingReport:
    """Write a model that is none of transformers'."""
    summary = save(run.model.state_dict(), folder / SINGLE, preset=preset)
    report = run.report().stored_as(preset, summary)
    run.recipe.save(folder)
    write_json(folder / FILE, report.to_json())
    return report
