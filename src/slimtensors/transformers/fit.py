"""`fit`: the best version of a model that fits into a number of bytes."""

import logging
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from slimtensors.archive import Archive, estimate
from slimtensors.archive.summary import Summary, format_bytes
from slimtensors.archive.write import ArchiveSource, TensorSource, write
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Encoded
from slimtensors.errors import ConfigError, group_names, shorten_list
from slimtensors.folder.config_json import (
    FIT_REPORT,
    describe_codes,
    read_config,
    read_dtype,
)
from slimtensors.folder.convert import main_dtype
from slimtensors.folder.job import replace_weights
from slimtensors.folder.weights import FolderOptions
from slimtensors.layerwise.budget import Budget, FitReport
from slimtensors.layerwise.divergence import Divergence, Reference
from slimtensors.layerwise.fisher import (
    Objective,
    Sampling,
    Statistics,
    collect_statistics,
    score_outputs,
)
from slimtensors.layerwise.fit import Fitter, Solution, scale_step
from slimtensors.layerwise.heal import heal as heal_model
from slimtensors.layerwise.inputs import Batch, remove_padding
from slimtensors.layerwise.resume import WorkFolder, compute_digests
from slimtensors.layerwise.stored_weights import StoredWeights
from slimtensors.parallel import Workers, serially
from slimtensors.recipe.calibration import Calibration, Data, batches_for
from slimtensors.storage import (
    INDEX,
    SINGLE,
    StrPath,
    check_separate,
    locate,
    note_parameters,
    write_json,
)
from slimtensors.tensor import Json
from slimtensors.transformers.auto import load_model, load_tokenizer
from slimtensors.transformers.data import find_generation_obstacle, generate_batches, select_columns
from slimtensors.transformers.weights import check_names, collect_dense_weights

_LOG = logging.getLogger(__name__)

CALIBRATION = Calibration(samples=64, length=512, batch_size=2)
"""Amount of data by default; more hardly changes the result."""

_PACKAGE = "slimtensors"
_HELD_OUT = 8
"""Samples, beyond those for calibration, on which the result is measured."""
_GRADIENT_SHARE = 0.5
"""Share of the samples for gradients."""
_MIN_BITS_WITHOUT_DATA = 4.0
_HEALING_BATCHES = 32
_HEALING_RESERVE = 0.0007
"""Share of the budget by which healing may change the size of files."""
_HEALED_FINENESS = 2
"""Resolution of row steps with healing: 1/32 octave, 1.1 % at most."""
_MAX_KL_PASSES = 8
_MAX_PRICED = 0.5
"""Octaves of the step after which prices of bits are measured again."""
_KL_TOLERANCE = 0.1
"""Share of a maximum divergence that may stay unused."""
_CURVE = (-1.5, -1.0, -0.5, 0.5, 1.0, 1.5)
"""Octaves of the step around the solution at which the report has the size."""


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
        run = _Run(loaded, budget, weights, options, workers, show)
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
        archive = stack.enter_context(Archive(model, storage_options=options.storage_options))
        if all(source.name in archive for source in sources):
            return lambda name: archive.load_one(name, serially)
    copies = {source.name: _as_tensor(source).clone() for source in sources}
    return copies.__getitem__


@dataclass(frozen=True)
class Samples:
    """Data to run a model on."""

    calibration: Sequence[Batch]
    held_out: Sequence[Batch]
    seed: int


Show = Callable[[str, float, float], object]
"""Called with a description of the work, the amount done, and the total."""


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


def _make_samples(run: "_Run", data: Data | None, settings: Calibration, tokenizer: Any) -> Samples:
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
    run: "_Run", data: Data, settings: Calibration, tokenizer: Any, label: str = ""
) -> list[Batch]:
    """Return batches without padding and unused columns."""
    batches, notes = batches_for(run.model, data, settings, tokenizer=tokenizer)
    run.notes += [f"{label}{note}" for note in notes]
    return [select_columns(run.model, x) for x in remove_padding(run.model, batches)]


def _add_samples(settings: Calibration, count: int) -> Calibration:
    return replace(settings, samples=settings.samples + count)


class _Run:
    """State of `fit`."""

    def __init__(
        self,
        model: Any,
        budget: Budget,
        weights: StoredWeights,
        options: FolderOptions,
        workers: Workers,
        show: Show,
    ) -> None:
        self.model, self.budget, self.weights = model, budget, weights
        self.options, self.workers, self.show = options, workers, show
        self.sources = weights.sources
        self.notes: list[str] = []
        self._check_finite()

    @property
    def _parameter_count(self) -> int:
        return sum(source.spec.numel for source in self.sources)

    @property
    def _limit(self) -> int | None:
        return self.budget.count_bytes(self._parameter_count)

    @cached_property
    def _fixed_bytes(self) -> int:
        """About the size of the tensors that are stored exactly, and of all headers."""
        fixed = {
            source.name: _as_tensor(source)
            for source in self.sources
            if source.name not in self.weights.stored
        }
        headers = 256 + 110 * len(self.sources)
        return headers + (estimate(fixed).stored_bytes if fixed else 0)

    def check_limit(self) -> None:
        """Raise if the budget is far too small; whether it is met is known at the end."""
        limit = self._limit
        if limit is None:
            return
        rounded = (x for x in self.sources if x.name in self.weights.stored)
        least = self._fixed_bytes + sum(int(_as_tensor(x).count_nonzero()) for x in rounded) // 16
        if limit < least:
            raise ConfigError(
                f"a budget of {format_bytes(limit)} is too small:"
                f" {format_bytes(self._fixed_bytes)} of weights stay exact, and half a bit for each"
                f" other weight that is not zero makes {format_bytes(least)}"
            )

    def find_lossless_size(self) -> int | None:
        """Return the size with lossless compression if the budget allows it, else None."""
        if self._limit is None or self._needs_loss(self._limit):
            return None
        with tempfile.TemporaryDirectory() as folder:
            write_weights(self.sources, Path(folder), self.options)
            size = _count_weight_bytes(Path(folder))
        return size if size <= self._limit else None

    def _needs_loss(self, limit: int) -> bool:
        """Return True if tensors, even without headers, are larger than a limit if not rounded."""
        total = 0
        for source in self.sources:
            total += estimate({source.name: _as_tensor(source)}).stored_bytes
            if total > limit:
                return True
        return False

    def keep_exact(self, size: int) -> tuple[FitReport, list[TensorSource]]:
        """Return the report and the tensors of a model that is stored without loss."""
        dense = sum(source.spec.nbytes for source in self.sources)
        self.notes.append("the budget is larger than the lossless size: stored without loss")
        notes = tuple(self.notes)
        report = FitReport(
            self.budget, self._parameter_count, dense, size, (), 0.0, None, (), notes
        )
        return report, list(self.sources)

    def _check_finite(self) -> None:
        broken = [
            source.name
            for source in self.sources
            if source.spec.dtype.is_floating_point and not bool(_as_tensor(source).isfinite().all())
        ]
        if broken:
            raise ConfigError(f"NaN or infinity in {shorten_list(broken)}")

    def check_without_data(self, reason: str) -> None:
        """Raise if the budget requires data."""
        bits = None if self._limit is None else 8 * self._limit / self._parameter_count
        if bits is None or bits < _MIN_BITS_WITHOUT_DATA:
            raise ConfigError(
                f"{reason}; pass more calibration data, or a budget of at least"
                f" {_MIN_BITS_WITHOUT_DATA:g} bits per parameter"
            )
        self.notes.append(f"{reason}: rounded without calibration data, the loss is unknown")

    def collect(self, samples: Samples, objective: Objective, folder: Path, *, keep: bool) -> None:
        """Collect statistics; those that the folder contains are used."""
        batches = samples.calibration
        sampling = Sampling(max(1, round(_GRADIENT_SHARE * len(batches))), samples.seed)
        pooled = self.weights.pooled
        name = f"{objective.__module__}.{getattr(objective, '__qualname__', repr(objective))}"
        if keep and "<" in name:
            raise ConfigError("a work folder requires an objective that is defined in a module")
        settings = (sampling, sorted(pooled), sorted(self.weights.layers), name, version(_PACKAGE))
        work = WorkFolder(folder, compute_digests(self.model, (), batches, settings))
        self.folder, self.work = folder, work if keep else None
        self.statistics = Statistics(work)
        if batches:
            collect_statistics(
                self.model,
                self.weights.layers,
                batches,
                objective,
                self.statistics,
                sampling=sampling,
                pooled=pooled,
                progress=lambda done, total: self.show("collecting statistics", done, total),
            )
        self.notes += self.statistics.notes
        self.tensors = self.weights.make_tensors(self.statistics)
        if self.weights.mixed:
            names = shorten_list(self.weights.mixed)
            self.notes.append(f"stored exactly, mixed with other weights in files: {names}")
        missing = [(tensor.name, tensor.note) for tensor in self.tensors if tensor.note]
        if batches and len(missing) == len(self.tensors):
            self.check_without_data("too little calibration data for any weight")
        for reason, names in group_names(missing).items():
            self.notes.append(f"rounded without statistics: {names} ({reason})")

    def _heal(self, solution: Solution, teacher: Reference, minutes: float) -> Solution:
        """Return a solution with scaled rows; the vectors of the model are changed in place."""
        factors = heal_model(
            self.model,
            self.weights.find_scalable(),
            teacher,
            seconds=60 * minutes,
            progress=lambda done, total: self.show("healing", done, total),
        )
        tensors = tuple(
            fitted.scale_rows(self.weights.find_factors(fitted.name, factors), self.workers.each)
            for fitted in solution.tensors
        )
        return replace(solution, tensors=tensors)

    def _try_healing(
        self, solution: Solution, reference: Reference, teacher: Reference, minutes: float
    ) -> tuple[Solution, Divergence]:
        """Heal a model; return the solution and its divergence, unhealed if that is better."""
        before = reference.compare(self.model)
        vectors = {name: x.clone() for name, x in self.model.state_dict().items() if x.dim() == 1}
        healed = self._heal(solution, teacher, minutes)
        self.weights.apply(healed, self.workers.each)
        after = reference.compare(self.model)
        limit = self._limit
        if limit is not None and self._measure(healed) > limit:
            reason = "it would exceed the budget"
        elif after.is_worse_than(before):
            reason = "it did not lower the divergence on held-out data"
        else:
            self.notes.append(f"healed: {before.describe_loss()} -> {after.describe_loss()}")
            self.sources = collect_dense_weights(self.model)
            return healed, after
        self.notes.append(f"healing was discarded: {reason}")
        self.model.load_state_dict(vectors, strict=False)
        self.weights.apply(solution, self.workers.each)
        return solution, before

    def solve(
        self, samples: Samples, heal: float | None, stack: ExitStack
    ) -> tuple[FitReport, list[TensorSource]]:
        """Return the report, and the tensors to store; the model has the rounded weights.

        The outputs of the original model are stored until `stack` is closed.
        """
        reference, teacher = None, None
        if samples.held_out:
            reference = stack.enter_context(Reference(self.model, samples.held_out))
        elif heal is not None:
            raise ConfigError("healing requires calibration data, and some held out")
        if heal is not None:
            some = samples.calibration[:_HEALING_BATCHES]
            teacher = stack.enter_context(Reference(self.model, some))
        fitter = Fitter(
            self.tensors,
            self.statistics,
            self.workers.each,
            self.work,
            self._make_progress(),
            row_fineness=0 if heal is None else _HEALED_FINENESS,
        )
        limit, divergence = self._limit, None
        if limit is not None:
            reserve = 0 if heal is None else int(_HEALING_RESERVE * limit)
            solution = fitter.solve(limit - reserve, self._fixed_bytes, self._measure)
            self.weights.apply(solution, self.workers.each)
        else:
            solution, divergence = self._search(fitter, reference)
        curve = self._make_curve(fitter, solution)
        if reference is not None and teacher is not None and heal is not None:
            solution, divergence = self._try_healing(solution, reference, teacher, heal)
        elif reference is not None and divergence is None:
            divergence = reference.compare(self.model)
        report = FitReport(
            self.budget,
            self._parameter_count,
            sum(source.spec.nbytes for source in self.sources),
            self._measure(solution),
            tuple(
                (x.name, x.encoded.spec.numel, round(x.bits, 4), x.loss, x.note)
                for x in solution.tensors
            ),
            solution.loss,
            divergence,
            curve,
            tuple(self.notes),
        )
        return report, self._make_sources(solution)

    def _make_sources(self, solution: Solution) -> list[TensorSource]:
        """Return the tensors to store."""
        fitted = {tensor.name: tensor.encoded for tensor in solution.tensors}
        return [_replace_by(source, fitted.get(source.name)) for source in self.sources]

    def _measure(self, solution: Solution) -> int:
        """Return the size of the weight files of a solution, by writing them."""
        with tempfile.TemporaryDirectory() as folder:
            write_weights(self._make_sources(solution), Path(folder), self.options)
            return _count_weight_bytes(Path(folder))

    def _make_progress(self) -> Callable[[str, int], None]:
        items = sum(tensor.spec.numel for tensor in self.tensors)
        last, done = "", 0

        def report(what: str, count: int) -> None:
            nonlocal last, done
            if what != last or done >= items:
                last, done = what, 0
            done += count
            self.show(what, done, items)

        return report

    def _search(self, fitter: Fitter, reference: Reference | None) -> tuple[Solution, Divergence]:
        """Return the smallest solution with at most the given divergence, as measured."""
        target = self.budget.kl
        assert target is not None, "the only other budget"
        if reference is None:
            raise ConfigError("a maximum divergence requires held-out data; pass more text")
        if not reference.are_logits:
            raise ConfigError("a maximum divergence requires logits; pass a size or bits")
        step = known = fitter.find_step(fitter.items / 2)
        least = math.inf
        best: tuple[Solution, Divergence] | None = None
        for _ in range(_MAX_KL_PASSES):
            if abs(math.log2(step / known)) > _MAX_PRICED:
                fitter.estimate(step)
                known = step
            solution = fitter.round_all(step)
            self.weights.apply(solution, self.workers.each)
            found = reference.compare(self.model)
            assert found.kl is not None, "logits were required"
            least = min(least, found.kl)
            _LOG.info("%d bytes: KL %.5f", solution.stored_bytes, found.kl)
            if found.kl <= target:
                if best is None or solution.stored_bytes < best[0].stored_bytes:
                    best = solution, found
                if found.kl >= target * (1 - _KL_TOLERANCE):
                    break
            step = scale_step(solution, found.kl, target * (1 - _KL_TOLERANCE / 2))
        if best is None:
            raise ConfigError(
                f"no solution with a KL divergence of at most {target} was found; the least was"
                f" {least:.3g}. Store the model without loss instead"
            )
        self.weights.apply(best[0], self.workers.each)
        return best

    def _make_curve(self, fitter: Fitter, solution: Solution) -> tuple[tuple[int, float], ...]:
        """Return sizes and predicted divergences around a solution."""
        fitter.curve.clear()
        points = [(solution.stored_bytes + self._fixed_bytes, solution.loss)]
        for octaves in _CURVE:
            size = fitter.estimate(solution.step * 2**octaves)
            points.append((round(size) + self._fixed_bytes, solution.loss * 4**octaves))
        return tuple(sorted(points))


def _replace_by(source: TensorSource, encoded: Encoded | None) -> TensorSource:
    return source if encoded is None else replace(source, read=lambda each: encoded)


def _as_tensor(source: TensorSource) -> Tensor:
    x = source.read(serially)
    assert isinstance(x, Tensor), "weights of a dense model are tensors"
    return x


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
    with Archive(source, storage_options=options.storage_options) as archive:
        location, stored_dtype = archive.location, main_dtype(archive)
    stored_dtype = read_dtype(read_config(location)) or stored_dtype
    check_names(model, sources)
    written: list[int] = []

    def put(folder: Path) -> Summary:
        summary = write_weights(sources, folder, options)
        written.append(_count_weight_bytes(folder))
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
    return replace(report, weight_bytes=_count_weight_bytes(folder))


def write_weights(sources: Sequence[TensorSource], folder: Path, options: FolderOptions) -> Summary:
    """Write tensors into an empty folder: one file, or shards of a given size."""
    path = folder if options.max_shard_size is not None else folder / SINGLE
    hidden = replace(options, progress=None).with_preset(presets.lossless)
    summary = write(ArchiveSource(list(sources)), path, hidden).summary()
    note_parameters(folder / INDEX, summary.items)
    return summary


def _count_weight_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


__all__ = ["Budget", "FitReport", "fit"]
