"""Train a model by a recipe, with the Trainer of transformers."""

import json
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from slimtensors.archive import save
from slimtensors.container import SINGLE, StrPath, local
from slimtensors.errors import MismatchError
from slimtensors.integrations.training import resuming
from slimtensors.integrations.training.data import examples
from slimtensors.integrations.training.report import FILE, TrainingReport, layers_of
from slimtensors.integrations.training.stage import Setup, train_stage
from slimtensors.integrations.transformers.models import load_model, load_tokenizer
from slimtensors.integrations.transformers.saving import enable, is_enabled
from slimtensors.recipe import Recipe
from slimtensors.recipe.modifiers import Distillation


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

    `model` is one in memory, or a folder or a name; compressed folders are decompressed. `recipe`
    are modifiers, or the YAML that tells them. `dataset` is what the Trainer takes, a DataLoader,
    texts, or a local file of them. `training_args` are the Trainer's own or a mapping of some;
    their `save_steps` says how often a checkpoint is saved, in `output_dir/checkpoints`, from which
    `resume_from_checkpoint=True` goes on bit for bit. A teacher is by default the model as it comes
    in. Masks hold through every step; whatever was pruned is zero in the end, or this raises.
    """
    made = Recipe.of(recipe)
    home = local(output_dir)
    resumed = resuming.find(home, made, resume_from_checkpoint) if resume_from_checkpoint else None
    module = load_model(model)
    words = tokenizer if tokenizer is not None else load_tokenizer(model)
    setup = Setup(
        training_args,
        words,
        examples(dataset, module, words),
        None if eval_dataset is None else examples(eval_dataset, module, words),
        _teacher(made, module, teacher),
    )
    held: dict[str, Tensor] = {}
    stages = []
    for stage in made.stages:
        if resumed is not None and stage.name != resumed.stage:
            continue
        folder = resuming.folder_of(home, stage.name)
        if resumed is None:
            resuming.begin(folder, made, held)
        else:
            held = resuming.held_in(folder)
        found, done = train_stage(module, stage, setup, folder=folder, held=held, resumed=resumed)
        held |= found
        stages.append(done)
        resumed = None
    _check(module, held)
    report = TrainingReport(tuple(stages), layers_of(module, held))
    _save(module, words, home, save_compressed=save_compressed)
    made.save(home)
    (home / FILE).write_text(json.dumps(report.to_json(), indent=2) + "\n")
    return module, report


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


def _check(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Raise if a weight that was pruned is not zero."""
    for name, mask in masks.items():
        weight = model.get_parameter(name).detach()
        broken = int(weight[~mask.to(weight.device)].count_nonzero())
        if broken:
            raise MismatchError(f"{name}: {broken} weights that were pruned are not zero")


def _save(model: Any, tokenizer: Any, home: Path, *, save_compressed: bool) -> None:
    if not hasattr(model, "save_pretrained"):
        preset = "sparse" if save_compressed else "dense"
        save(model.state_dict(), home / SINGLE, preset=preset)
        return
    (model if is_enabled(model) else enable(model)).save_pretrained(
        home, save_compressed=save_compressed
    )
    if tokenizer is not None:
        tokenizer.save_pretrained(home)
