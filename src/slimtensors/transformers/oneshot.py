"""`oneshot`: prune and quantize a transformers model without training it."""

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from torch import nn
from tqdm import tqdm
from transformers import PreTrainedModel

from slimtensors.archive import inspect
from slimtensors.compat.compressor import ModelCompressor
from slimtensors.errors import ConfigError, shorten_list
from slimtensors.folder.architecture import Architecture, Kind
from slimtensors.folder.config_json import read_config, read_quantization_section
from slimtensors.layerwise.engine import Progress
from slimtensors.layerwise.inputs import remove_padding
from slimtensors.layerwise.report import LayerReport
from slimtensors.quantization.checkpoint_layout import (
    convert_for_saving,
    outline_state,
)
from slimtensors.recipe import Calibration, Recipe
from slimtensors.recipe.calibration import Batch, batches_for
from slimtensors.recipe.modifiers import QuantizationModifier
from slimtensors.recipe.oneshot import (
    Start,
    apply_recipe,
    check_recipe,
    check_targets,
    find_unchanged,
    make_config,
    plan_quantization,
)
from slimtensors.recipe.report import REPORT_FILE, Report, measure
from slimtensors.storage import LocalLocation, StrPath, check_separate, local_path, write_json
from slimtensors.storage.atomic import create_folder
from slimtensors.transformers.auto import load_model, load_tokenizer
from slimtensors.transformers.data import find_unused_columns, select_columns
from slimtensors.transformers.saving import (
    check_codes_suffice,
    enable,
    find_unstorable_weights,
    save_codes,
    save_quantized,
)

AnyReport = TypeVar("AnyReport", bound=Report)

_SPARSE = 0.4
"""Fraction of zeros from which codes with a mask are smaller than packed codes."""


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
    """Apply a recipe to a model without training; return the model and a report.

    Args:
        model: module, changed in place; or a folder, dense or compressed, or a model name.
        recipe: modifiers, stages, YAML, or the path of a YAML file.
        dataset: calibration data: texts, a local txt, jsonl or csv file, a `datasets.Dataset`, a
            DataLoader, or a list of batches.
        output_dir: folder for the model, `recipe.yaml` and `report.json`. It appears when it is
            complete, and replaces an existing model folder.
        save_compressed: save in the format that suits the model; False saves dense weights.
        calibration: amount of data, and how it is made from texts.
        tokenizer: tokenizer for texts; by default that of the folder.

    Example:
        >>> from slimtensors.recipe import GPTQ
        >>> from slimtensors.transformers import oneshot
        >>> recipe = [GPTQ("W4A16", ignore=["lm_head"])]
        >>> model, report = oneshot("my-model", recipe, "text.txt", output_dir="my-w4a16")
        >>> print(report)
    """
    parsed = Recipe.of(recipe)
    settings = calibration or Calibration()
    check_recipe(parsed, has_data=dataset is not None)
    sources = [model] if isinstance(model, str | os.PathLike) else []
    if settings.work is not None:
        check_separate(LocalLocation(local_path(settings.work)), sources)
    with _create_output(output_dir, sources) as folder:
        loaded = load_model(model)
        check_targets(parsed, loaded)
        if folder is not None:
            check_savable(loaded, parsed, save_compressed=save_compressed)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(model)
        batches: list[Batch] = []
        texts: list[Batch] = []
        notes: list[str] = []
        if dataset is not None:
            batches, notes = _make_batches(loaded, dataset, settings, tokenizer)
        if settings.evaluate is not None:
            texts, missing = _make_batches(loaded, settings.evaluate, settings, tokenizer)
            notes += [f"evaluate: {note}" for note in missing]
        before = measure(loaded, texts) if texts else None
        with show_progress() as start:
            steps = apply_recipe(loaded, parsed, batches, work=settings.work, start=start)
        report = Report.of(loaded, steps, notes)
        report = replace(report, unchanged=find_unchanged(loaded, parsed, steps))
        if before is not None:
            report = replace(report, quality=measure(loaded, texts).compare(before))
        if folder is not None:
            report = save_model(loaded, folder, parsed, report, save_compressed=save_compressed)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
    return loaded, report


def save_model(
    model: Any, folder: Path, recipe: Recipe, report: AnyReport, *, save_compressed: bool
) -> AnyReport:
    """Save a model with its recipe and report; return the report with the stored sizes.

    A quantized model is stored in the dialect compressed-tensors, which other loaders read. If it
    is also sparse, and activations are not quantized, it is stored in the dialect slim, which is
    smaller. A sparse model is stored as bitmasks and values, in the layout of SparseML.
    """
    enable(model)
    quantizing = [each for each in recipe.modifiers if isinstance(each, QuantizationModifier)]
    if quantizing and save_compressed:
        config = make_config(model, quantizing[0])
        if report.sparsity < _SPARSE or config.has_activations:
            format, notes = save_quantized(model, folder, ModelCompressor(config))
        else:
            format, notes = "slim", save_codes(model, folder)
        report = replace(report, notes=(*report.notes, *notes))
    else:
        model.save_pretrained(folder, save_compressed=save_compressed)
        format = read_quantization_section(read_config(folder)).get("preset", "dense")
    report = report.stored_as(format, inspect(folder))
    recipe.save(folder)
    write_json(folder / REPORT_FILE, report.to_json())
    return report


def check_savable(model: nn.Module, recipe: Recipe, *, save_compressed: bool) -> None:
    """Raise if a model cannot be saved as a folder of transformers after a recipe."""
    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"output_dir requires a model of transformers, got {type(model).__name__};"
            " use slimtensors.save instead"
        )
    _check_config(model)
    _check_saved_names(model)
    for modifier in recipe.modifiers if save_compressed else ():
        if isinstance(modifier, QuantizationModifier):
            config = make_config(model, modifier)
            if unstorable := find_unstorable_weights(model, plan_quantization(model, config)):
                check_codes_suffice(unstorable, config)


def _check_config(model: PreTrainedModel) -> None:
    """Raise if the config of a model cannot be saved and loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model.config.save_pretrained(folder)
            type(model.config).from_pretrained(folder)
            if model.can_generate():
                model.generation_config.save_pretrained(folder)
        except Exception as error:  # configs validate themselves in many ways
            raise ConfigError(f"the config of the model cannot be saved: {error}") from error


def _check_saved_names(model: PreTrainedModel) -> None:
    """Raise if transformers saves weights of a model under names that it does not load."""
    try:
        config = model.config.to_dict() | {"architectures": [type(model).__name__]}
        architecture = Architecture.build(config)
    except ConfigError:
        return  # a class that is not from transformers
    places = architecture.place(convert_for_saving(model, outline_state(model)))
    if lost := [name for name, place in places.items() if place.kind is Kind.UNKNOWN]:
        raise ConfigError(
            f"transformers does not load a {type(model).__name__} that it saved: it has no"
            f" parameter for {shorten_list(lost)}"
        )


def _create_output(
    path: StrPath | None, sources: Sequence[StrPath]
) -> AbstractContextManager[Path | None]:
    """Return a context with the folder to fill; raise at once if `path` cannot be written."""
    return nullcontext() if path is None else create_folder(path, replace=True, sources=sources)


def _make_batches(
    model: Any, dataset: Any, settings: Calibration, tokenizer: Any
) -> tuple[list[Batch], list[str]]:
    """Return batches on the device of the model, and notes on deviations from the request."""
    padded, notes = batches_for(model, dataset, settings, tokenizer=tokenizer)
    # Before columns are selected: the model may not accept the attention mask.
    batches = remove_padding(model, padded)
    unused = sorted({name for batch in batches for name in find_unused_columns(model, batch)})
    if unused:
        notes.append(f"columns that the model does not accept are ignored: {', '.join(unused)}")
        batches = [select_columns(model, batch) for batch in batches]
    device = next(model.parameters()).device
    return [_move(batch, device) for batch in batches], notes


def _move(batch: Batch, device: Any) -> Batch:
    if hasattr(batch, "to"):
        return batch.to(device)
    if hasattr(batch, "items"):
        return {key: x.to(device) if hasattr(x, "to") else x for key, x in batch.items()}
    return [x.to(device) if hasattr(x, "to") else x for x in batch]


@contextmanager
def show_progress() -> Iterator[Start]:
    """Show a progress bar with the remaining time, one at a time, if stderr is a terminal."""
    bars: list[Any] = []

    def start(name: str) -> Progress:
        close()
        bar = tqdm(
            desc=name,
            unit=" layers",
            bar_format="{desc}: {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} layers"
            " [{elapsed}<{remaining}]",
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            leave=False,
        )
        bars.append(bar)

        def show(report: LayerReport, done: int, total: int) -> None:
            if bar.total != total:  # show the total at once, however short the work is
                bar.total = total
                bar.refresh()
            bar.update(done - bar.n)

        return show

    def close() -> None:
        while bars:
            bars.pop().close()

    try:
        yield start
    finally:
        close()
