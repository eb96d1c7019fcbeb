"""The solution for a budget: statistics, steps, rounded weights, healing and the report."""

import logging
import math
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from torch import Tensor

from slimtensors.archive import estimate
from slimtensors.archive.summary import Summary, format_bytes
from slimtensors.archive.write import ArchiveSource, TensorSource, write
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Encoded
from slimtensors.errors import ConfigError, group_names, shorten_list
from slimtensors.folder.weights import FolderOptions
from slimtensors.layerwise.budget import Budget, FitReport
from slimtensors.layerwise.divergence import Divergence, Reference
from slimtensors.layerwise.fisher import Objective, Sampling, collect_statistics
from slimtensors.layerwise.fit import Fitter, Solution, scale_step
from slimtensors.layerwise.heal import heal as heal_model
from slimtensors.layerwise.inputs import Batch
from slimtensors.layerwise.resume import WorkFolder, compute_digests
from slimtensors.layerwise.statistics import Statistics
from slimtensors.layerwise.stored_weights import StoredWeights
from slimtensors.parallel import Workers, serially
from slimtensors.storage import INDEX, SINGLE, note_parameters
from slimtensors.transformers.weights import collect_dense_weights

_LOG = logging.getLogger(__name__)

_PACKAGE = "slimtensors"
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


@dataclass(frozen=True)
class Samples:
    """Data to run a model on."""

    calibration: Sequence[Batch]
    held_out: Sequence[Batch]
    seed: int


Show = Callable[[str, float, float], object]
"""Called with a description of the work, the amount done, and the total."""


class Run:
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
            source.name: as_tensor(source)
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
        least = self._fixed_bytes + sum(int(as_tensor(x).count_nonzero()) for x in rounded) // 16
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
            size = count_weight_bytes(Path(folder))
        return size if size <= self._limit else None

    def _needs_loss(self, limit: int) -> bool:
        """Return True if tensors, even without headers, are larger than a limit if not rounded."""
        total = 0
        for source in self.sources:
            total += estimate({source.name: as_tensor(source)}).stored_bytes
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
            if source.spec.dtype.is_floating_point and not bool(as_tensor(source).isfinite().all())
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
            return count_weight_bytes(Path(folder))

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


def as_tensor(source: TensorSource) -> Tensor:
    """Return the tensor of a dense model."""
    x = source.read(serially)
    assert isinstance(x, Tensor), "weights of a dense model are tensors"
    return x


def write_weights(sources: Sequence[TensorSource], folder: Path, options: FolderOptions) -> Summary:
    """Write tensors into an empty folder: one file, or shards of a given size."""
    path = folder if options.max_shard_size is not None else folder / SINGLE
    hidden = replace(options, progress=None).with_preset(presets.lossless)
    summary = write(ArchiveSource(list(sources)), path, hidden).summary()
    note_parameters(folder / INDEX, summary.items)
    return summary


def count_weight_bytes(folder: Path) -> int:
    """Return the size of all weight files."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


__all__ = ["Run", "Samples", "Show", "as_tensor", "count_weight_bytes", "write_weights"]
