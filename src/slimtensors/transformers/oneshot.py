"""`oneshot`: make a model of transformers sparse and quantized, without training it."""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from slimtensors.archive import inspect
from slimtensors.compat.compressor import ModelCompressor
from slimtensors.errors import ConfigError
from slimtensors.folder.config_json import read_config
from slimtensors.folder.convert import Rewrite, convert_folder
from slimtensors.layerwise.engine import Progress
from slimtensors.layerwise.inputs import remove_padding
from slimtensors.layerwise.report import LayerReport
from slimtensors.quantization import QuantizationConfig
from slimtensors.recipe import Calibration, Recipe
from slimtensors.recipe.calibration import Batch, batches_for
from slimtensors.recipe.modifiers import QuantizationModifier
from slimtensors.recipe.oneshot import Start, apply_recipe, check_recipe, config_for
from slimtensors.recipe.report import FILE, Report, measure
from slimtensors.storage import StrPath, write_json
from slimtensors.storage.atomic import create_folder
from slimtensors.transformers.auto import load_model, load_tokenizer
from slimtensors.transformers.data import columns_for, unused_columns
from slimtensors.transformers.saving import enable

Told = TypeVar("Told", bound=Report)

_SPARSE = 0.4
"""The share of zeros from which on codes are smaller with a mask than packed."""


def check_model(model: nn.Module) -> None:
    """Raise if a model cannot be saved as a folder of transformers."""
    if not isinstance(model, PreTrainedModel):
        kind = type(model).__name__
        raise ConfigError(f"{kind} is no model of transformers; slimtensors.save can store it")


def save_model(
    model: Any, folder: Path, recipe: Recipe, report: Told, *, save_compressed: bool
) -> Told:
    """Save a model with its recipe and its report, and return the report with what it took.

    What is quantized is stored as compressed-tensors has it, for stock loaders; what is also sparse
    as codes and masks, which takes less, unless activations are quantized too; what is only sparse
    in the preset `sparse`.
    """
    enable(model)
    quantizing = [each for each in recipe.modifiers if isinstance(each, QuantizationModifier)]
    if quantizing and save_compressed:
        config = config_for(model, quantizing[0])
        if report.sparsity < _SPARSE or config.has_activations:
            format = _save_quantized(model, config, folder)
        else:
            format = _save_sparse_codes(model, config, folder)
    else:
        model.save_pretrained(folder, save_compressed=save_compressed)
        format = read_config(folder).get("quantization_config", {}).get("preset", "dense")
    report = report.stored_as(format, inspect(folder))
    recipe.save(folder)
    write_json(folder / FILE, report.to_json())
    return report


def _save_quantized(model: Any, config: QuantizationConfig, folder: Path) -> str:
    state = ModelCompressor(config).compress(model)
    try:
        type(model).save_pretrained(model, folder, state_dict=state)
        return str(model.config.quantization_config["format"])
    finally:
        del model.config.quantization_config  # of the folder: the model itself has dense weights


def _save_sparse_codes(model: Any, config: QuantizationConfig, folder: Path) -> str:
    with TemporaryDirectory(prefix=".", dir=folder.parent) as beside:
        first = Path(beside, "quantized")
        _save_quantized(model, config, first)
        convert_folder(first, folder, to="slim", how=Rewrite(replace=True))
    return "slim"


def oneshot(
    model: nn.Module | StrPath,
    recipe: Any,
    dataset: Any = None,
    *,
    output_dir: StrPath | None = None,
    save_compressed: bool = True,
    calibration: Calibration | None = None,
    tokenizer: Any = None,
) -> tuple[Any, Report]:
    """Do to a model what a recipe says, and return it with a report.

    `model` is changed in place, or loaded from a folder, compressed or not, or by name. `recipe`
    is modifiers, stages, YAML, or the path of a YAML file. `dataset` is a list of texts, a local
    txt, jsonl or csv file, a `datasets.Dataset`, a DataLoader, or a list of batches; texts need a
    `tokenizer`, by default that of the folder. With an `output_dir`, the model is saved there, in
    the format that suits it unless `save_compressed` is off, with `recipe.yaml` and `report.json`;
    the folder appears when it is complete, and replaces one that holds a model.
    """
    made = Recipe.of(recipe)
    how = calibration or Calibration()
    check_recipe(made, has_data=dataset is not None)
    with _folder(output_dir) as folder:
        loaded = load_model(model)
        if folder is not None:
            check_model(loaded)
        words = tokenizer if tokenizer is not None else load_tokenizer(model)
        batches, notes = ([], []) if dataset is None else _batches(loaded, dataset, how, words)
        texts: list[Batch] = []
        if how.evaluate is not None:
            texts, missing = _batches(loaded, how.evaluate, how, words)
            notes += [f"evaluate: {note}" for note in missing]
        before = measure(loaded, texts) if texts else None
        with _bars() as start:
            steps = apply_recipe(loaded, made, batches, work=how.work, start=start)
        report = Report.of(loaded, steps, notes)
        if before is not None:
            report = replace(report, quality=measure(loaded, texts).compare(before))
        if folder is not None:
            report = save_model(loaded, folder, made, report, save_compressed=save_compressed)
            if words is not None:
                words.save_pretrained(folder)
    return loaded, report


def _folder(path: StrPath | None) -> AbstractContextManager[Path | None]:
    """Give a folder that takes its place at the end; that it can is known from the beginning."""
    return nullcontext() if path is None else create_folder(path, replace=True)


def _batches(
    model: Any, dataset: Any, how: Calibration, tokenizer: Any
) -> tuple[list[Batch], list[str]]:
    """Return batches on the model's device, and what of them is not as asked for."""
    given, notes = batches_for(model, dataset, how, tokenizer=tokenizer)
    batches = remove_padding(model, given)  # now, as the model may not take the mask
    unused = sorted({name for batch in batches for name in unused_columns(model, batch)})
    if unused:
        notes.append(f"the model does not take {', '.join(unused)}: left out")
        batches = [columns_for(model, batch) for batch in batches]
    device = next(model.parameters()).device
    return [_on(device, batch) for batch in batches], notes


def _on(device: Any, batch: Batch) -> Batch:
    if hasattr(batch, "to"):
        return batch.to(device)
    if hasattr(batch, "items"):
        return {key: x.to(device) if hasattr(x, "to") else x for key, x in batch.items()}
    return [x.to(device) if hasattr(x, "to") else x for x in batch]


@contextmanager
def _bars() -> Iterator[Start]:
    """Show a bar on stderr for each modifier, if somebody is looking."""
    bars: list[Any] = []

    def start(name: str) -> Progress:
        bar = tqdm(desc=name, unit=" layers", file=sys.stderr, disable=not sys.stderr.isatty())
        bars.append(bar)

        def show(report: LayerReport, done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        return show

    try:
        yield start
    finally:
        for bar in bars:
            bar.close()
