"""`fit`: the best version of a model that fits into a number of bytes."""

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import TensorSource
from slimtensors.errors import ConfigError
from slimtensors.folder.config_json import FIT_REPORT, describe_codes, read_config, read_dtype
from slimtensors.folder.convert import main_dtype
from slimtensors.folder.job import replace_weights
from slimtensors.folder.weights import FolderOptions
from slimtensors.layerwise.budget import Budget, FitReport
from slimtensors.layerwise.fisher import Objective, score_outputs
from slimtensors.layerwise.inputs import Batch, remove_padding
from slimtensors.layerwise.stored_weights import StoredWeights
from slimtensors.parallel import Workers, serially
from slimtensors.recipe.calibration import Calibration, Data, batches_for
from slimtensors.storage import StrPath, check_separate, locate, write_json
from slimtensors.tensor import Json
from slimtensors.transformers.auto import load_model, load_tokenizer
from slimtensors.transformers.data import find_generation_obstacle, generate_batches, select_columns
from slimtensors.transformers.fit_run import (
    Run,
    Samples,
    Show,
    as_tensor,
    count_weight_bytes,
    write_weights,
)
from slimtensors.transformers.weights import check_names, collect_dense_weights

CALIBRATION = Calibration(samples=64, length=512, batch_size=2)
"""Amount of data by default; more hardly changes the result."""

_HELD_OUT = 8
"""Samples, beyond those for calibration, on which the result is measured."""


def fit(
    model: nn.Module | StrPath,
    budget: Budget | int | str,
    dataset: Any = None,
    *,
    output_dir: StrPath | None = None,
    calibration: Calibration | None = None,
    ignore: Sequence[str] = (),
    heal: float | None = None,
    objective: Objective | None = None,
    tokenizer: Any = None,
    how: FolderOptions | None = None,
) -> tuple[Any, FitReport]:
    """Round the weights of a model so that they fit a budget at the least divergence.

    Args:
        model: model folder; or a module, whose weights are changed in place.
        budget: bytes of the weight files, such as `"60MB"`, or a `Budget`.
        dataset: calibration data: texts, a local txt, jsonl or csv file, a `datasets.Dataset`, a
            DataLoader, or a list of batches. Default: text that the model generates.
        output_dir: folder to write. It appears when it is complete. For a module, it contains only
            the weights, for `slimtensors.load`.
        calibration: amount of data. Its `evaluate` is the held-out data on which the divergence is
            measured; by default, the last samples of `dataset` are held out. Its `work` is a
            folder for statistics, which later calls with the same data use.
        ignore: layers to store exactly: names, classes, or `re:` patterns.
        heal: minutes for which norms, biases and the scales of rows are then trained on the
            calibration data. The result depends on the speed of the machine.
        objective: function of a model and a batch that returns a score and the number of
            predictions; by default, labels are drawn from the logits.
        tokenizer: tokenizer for texts; by default that of the folder.
        how: shard size, threads and other options of the folder.

    Example:
        >>> from slimtensors.transformers import fit
        >>> model, report = fit("my-model", "60MB", "text.txt", output_dir="my-model-60MB")
        >>> print(report)
    """
    budget = budget if isinstance(budget, Budget) else Budget(size=budget)
    if heal is not None and not heal > 0:
        raise ConfigError(f"heal must be a positive number of minutes, got {heal!r}")
    settings = calibration or CALIBRATION
    options = how or FolderOptions()
    targets = [path for path in (output_dir, settings.work) if path is not None]
    for target in targets:
        where = locate(target, storage_options=options.storage_options)
        if not isinstance(model, nn.Module):
            check_separate(where, [str(model)])
        if target is output_dir and not options.replace and where.exists():
            raise ConfigError(f"{target} already exists; pass how=FolderOptions(replace=True)")
    data = None if dataset is None else Data.of(dataset)
    loaded = load_model(model)
    if devices := {x.device.type for x in loaded.parameters()} - {"cpu"}:
        raise ConfigError(f"fit runs on the CPU, but the model is on {devices.pop()}; move it")
    if tokenizer is None and any(x is not None for x in (data, settings.evaluate)):
        tokenizer = load_tokenizer(model)
    with ExitStack() as stack:
        show = stack.enter_context(_show_progress(options))
        workers = stack.enter_context(Workers(options.threads))
        sources = collect_dense_weights(loaded)
        read = _read_originals(model, sources, options, stack)
        weights = StoredWeights(loaded, sources, read, ignore)
        run = Run(loaded, budget, weights, options, workers, show)
        run.check_limit()
        if (exact_bytes := run.find_lossless_size()) is not None:
            report, sources = run.keep_exact(exact_bytes)
        else:
            if isinstance(model, nn.Module):
                stack.enter_context(_restore_on_error(loaded, weights))
            samples = _make_samples(run, data, settings, tokenizer)
            folder = settings.work or stack.enter_context(tempfile.TemporaryDirectory())
            run.collect(
                samples, objective or score_outputs, Path(folder), keep=settings.work is not None
            )
            report, sources = run.solve(samples, heal, stack)
        if output_dir is not None:
            report = _write(model, output_dir, loaded, sources, report, options)
    return loaded, report


@contextmanager
def _restore_on_error(model: nn.Module, weights: StoredWeights) -> Iterator[None]:
    """Restore the weights of a module after an error."""
    vectors = {name: x.clone() for name, x in model.state_dict().items() if x.dim() == 1}
    try:
        yield
    except BaseException:
        model.load_state_dict(vectors, strict=False)
        weights.restore()
        raise


def _read_originals(
    model: nn.Module | StrPath,
    sources: Sequence[TensorSource],
    options: FolderOptions,
    stack: ExitStack,
) -> Callable[[str], Tensor]:
    """Return a function that reads original tensors by name, after the model has changed.

    They are read from the folder of the model. Those of a module are copied.
    """
    if not isinstance(model, nn.Module):
        archive = stack.enter_context(open_archive(model, options.storage_options))
        if all(source.name in archive for source in sources):
            return lambda name: archive.load_one(name, serially)
    copies = {source.name: as_tensor(source).clone() for source in sources}
    return copies.__getitem__


@contextmanager
def _show_progress(options: FolderOptions) -> Iterator[Show]:
    """Show a progress bar with the time left if stderr is a terminal."""
    hidden = options.progress is not None or not sys.stderr.isatty()
    bar = tqdm(
        disable=hidden,
        file=sys.stderr,
        bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}",
        leave=False,
    )

    current = ""

    def show(what: str, done: float, total: float) -> None:
        nonlocal current
        if what != current or done < bar.n:
            current = what
            bar.reset(total)
            bar.set_description_str(what, refresh=False)
        bar.update(done - bar.n)

    try:
        yield show
    finally:
        bar.close()


def _make_samples(run: Run, data: Data | None, settings: Calibration, tokenizer: Any) -> Samples:
    """Return data for calibration and held-out data; note what deviates from the request."""
    model, count = run.model, max(1, _HELD_OUT // settings.batch_size)
    wanted = settings if settings.evaluate is not None else _add_samples(settings, _HELD_OUT)
    if data is not None:
        batches = _prepare(run, data, wanted, tokenizer)
    elif reason := find_generation_obstacle(model):
        run.check_without_data(reason)
        batches = []
    else:
        batches = generate_batches(
            model, wanted, lambda done, total: run.show("generating text", done, total)
        )
        run.notes.append("calibrated on text that the model generated")
    if settings.evaluate is not None:
        held_out = _prepare(run, Data.of(settings.evaluate), settings, tokenizer, "evaluate: ")
        return Samples(batches, held_out, settings.seed)
    if len(batches) < 2 * count:
        count = len(batches) // 3
    if not count and batches:
        run.notes.append("too little data to hold some out: the divergence was not measured")
    held_out = batches[len(batches) - count :]
    return Samples(batches[: len(batches) - count], held_out, settings.seed)


def _prepare(
    run: Run, data: Data, settings: Calibration, tokenizer: Any, label: str = ""
) -> list[Batch]:
    """Return batches without padding and unused columns."""
    batches, notes = batches_for(run.model, data, settings, tokenizer=tokenizer)
    run.notes += [f"{label}{note}" for note in notes]
    return [select_columns(run.model, x) for x in remove_padding(run.model, batches)]


def _add_samples(settings: Calibration, count: int) -> Calibration:
    return replace(settings, samples=settings.samples + count)


def _write(
    source: nn.Module | StrPath,
    target: StrPath,
    model: Any,
    sources: Sequence[TensorSource],
    report: FitReport,
    options: FolderOptions,
) -> FitReport:
    """Write a model folder; return the report with the size of its files."""
    if isinstance(source, PreTrainedModel):
        with tempfile.TemporaryDirectory() as folder:
            source.save_pretrained(folder)  # for its configs; the weights are replaced
            return _write(folder, target, model, sources, report, options)
    if isinstance(source, nn.Module):
        return _write_file(target, sources, report, options)
    with open_archive(source, options.storage_options) as archive:
        location, stored_dtype = archive.location, main_dtype(archive)
    stored_dtype = read_dtype(read_config(location)) or stored_dtype
    check_names(model, sources)
    written: list[int] = []

    def put(folder: Path) -> Summary:
        summary = write_weights(sources, folder, options)
        written.append(count_weight_bytes(folder))
        return summary

    def edit(config: Json, summary: Summary) -> Json:
        return describe_codes(config, summary, stored_dtype)

    files = {FIT_REPORT: report.to_json()}
    replace_weights(location, target, put, edit, sources=[source], options=options, files=files)
    local = [x for x in Path(target).rglob("*") if x.is_file()]
    total = sum(x.stat().st_size for x in local) if local else None
    return replace(report, weight_bytes=written[-1], folder_bytes=total)


def _write_file(
    target: StrPath, sources: Sequence[TensorSource], report: FitReport, options: FolderOptions
) -> FitReport:
    """Write the weights and the report of a module that transformers does not know."""
    folder = Path(target)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as made:
        new = Path(made) / "new"
        new.mkdir()
        write_weights(sources, new, options)
        write_json(new / FIT_REPORT, report.to_json())
        if folder.exists():
            folder.rename(Path(made) / "old")
        new.rename(folder)
    return replace(report, weight_bytes=count_weight_bytes(folder))


__all__ = ["Budget", "FitReport", "fit"]
