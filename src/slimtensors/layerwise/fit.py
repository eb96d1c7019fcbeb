"""Fit the weights of a model into a number of bytes.

The step of weight (i, j) is `c` times what its row and its column tolerate: `Uⱼⱼ / √Gᵢ`, with the
statistics of `slimtensors.layerwise.fisher`. Rounding then costs the same divergence everywhere, so
the single number `c` divides the bytes among tensors, rows and columns.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from slimtensors.archive.dialects.slim import pack_encoded
from slimtensors.archive.summary import format_bytes
from slimtensors.codecs import Trellis
from slimtensors.codecs.plan import Encoded, decode
from slimtensors.codecs.trellis import PRICE_OF_BIT, Rounded, Steps, round_matrix, scale_rows
from slimtensors.errors import ConfigError
from slimtensors.layerwise.resume import WorkFolder
from slimtensors.layerwise.statistics import InputFactor, Statistics
from slimtensors.parallel import Each
from slimtensors.tensor import Spec

_LOG = logging.getLogger(__name__)

TOLERANCE = 0.002
"""Largest share of a budget that may stay unused."""

_SAMPLE, _MIN_SAMPLE = 17, 64
"""One row in this many is rounded to estimate a size, but at least the second number of rows.

Rows do not depend on each other. An odd distance avoids rows at the same place of each head.
"""
_MAX_SAMPLES, _MAX_PASSES = 8, 6
_CHUNK_OVERHEAD, _BLOB_OVERHEAD, _SIDE_BYTES = 140, 400, 0.7
"""Bytes of coder states per chunk, of the header of a tensor, and of the steps of a row."""
_AIM = 1 - TOLERANCE / 3
"""Share of the budget to aim at."""
_MAX_LEAP = 4.0
"""Octaves by which a step may be outside of the steps with known sizes."""
_BITS_PER_OCTAVE = 0.9
"""Bits per weight that are saved by doubling the step."""
_ZEROS = 0.05
"""Share of zeros from which they are taken for a mask and kept."""
_SMOOTHING = 0.05
"""Share of the mean sensitivity that is added to each row: calibration data is finite."""
_MAX_INTEGER = 1 << 20
"""Integer of the largest weight of a column; finer steps would change nothing."""
_ROUNDED, _FACTS = "rounded ", "facts"
"""Names in the work folder: prefix of tensors; step, fineness, bytes and loss of one."""


@dataclass(frozen=True)
class FitTensor:
    """A tensor of a checkpoint that is to be rounded."""

    name: str
    spec: Spec
    read: Callable[[], Tensor]
    codec: Trellis
    """How it is a matrix."""
    inputs: str | None = None
    """Key of its inputs in the statistics; None: there are no statistics."""
    sensitivity: Tensor | None = None
    """Mean squared gradient of the output of each row; None without statistics."""
    smoothing: float = _SMOOTHING
    note: str = ""
    """Why statistics are missing."""

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns."""
        shape = list(self.spec.shape)
        if self.codec.transposed:
            shape[-1], shape[-2] = shape[-2], shape[-1]
        rows = math.prod(shape[: self.codec.row_dims])
        return rows, math.prod(shape) // rows


@dataclass(frozen=True)
class FittedTensor:
    """A rounded tensor."""

    name: str
    encoded: Encoded
    stored_bytes: int
    loss: float | None
    """Divergence that it adds, as predicted by the statistics; None without them."""
    note: str = ""

    @property
    def bits(self) -> float:
        """Stored bits per weight."""
        return 8 * self.stored_bytes / self.encoded.spec.numel

    def scale_rows(self, factors: Tensor, each: Each) -> "FittedTensor":
        """Return a copy with each row multiplied by a factor; integers stay the same."""
        codec, parts = self.encoded.codec, self.encoded.parts
        assert isinstance(codec, Trellis), "tensors are rounded by it"
        plain = {name: x for name, x in parts.items() if isinstance(x, Tensor)}
        scaled = scale_rows(plain, codec, self.encoded.spec, factors)
        encoded = replace(self.encoded, parts=scaled)
        size = count_stored_bytes(self.name, encoded, each)
        return replace(self, encoded=encoded, stored_bytes=size)


@dataclass(frozen=True)
class Solution:
    """All rounded tensors at one step."""

    step: float
    tensors: tuple[FittedTensor, ...]

    @property
    def stored_bytes(self) -> int:
        """Bytes of all rounded tensors."""
        return sum(tensor.stored_bytes for tensor in self.tensors)

    @property
    def loss(self) -> float:
        """Predicted divergence."""
        return sum(tensor.loss or 0.0 for tensor in self.tensors)


Progress = Callable[[str, int], object]
"""Called with a description of the work and the number of weights just processed."""


Measure = Callable[[Solution], int]


@dataclass
class Fitter:
    """Rounds tensors at any step, and finds the step for a size."""

    tensors: Sequence[FitTensor]
    statistics: Statistics
    each: Each
    work: WorkFolder | None = None
    progress: Progress | None = None
    price_of_bit: float = PRICE_OF_BIT
    row_fineness: int = 0
    """Resolution of row steps; higher for rows that will be scaled."""
    curve: list[tuple[float, float]] = field(default_factory=list)
    """Steps that were tried, and the bytes of all tensors."""
    _parameters: dict[str, bytes] = field(default_factory=dict)

    @property
    def items(self) -> int:
        """Number of weights."""
        return sum(tensor.spec.numel for tensor in self.tensors)

    def find_step(self, nbytes: float) -> float:
        """Return the step at which the tensors take about this many bytes, from samples."""
        if not self.tensors:
            raise ConfigError("the model has no weight that can be rounded")
        bits = 8 * nbytes / self.items
        # A normal weight takes about log2(rms / step) bits more than one at step 1.
        step = self._unit / 2 ** (bits - 1.0)
        known = sorted(self.curve)
        if known:
            step = _interpolate(known, nbytes)
        for _ in range(_MAX_SAMPLES):
            size = self.estimate(step)
            if abs(size / nbytes - 1) < 4 * TOLERANCE:
                break
            step = (
                _interpolate(self.curve, nbytes)
                if len(self.curve) > 1
                else step * 2 ** (8 * (size - nbytes) / self.items / _BITS_PER_OCTAVE)
            )
        return step

    def estimate(self, step: float) -> float:
        """Return about how many bytes all tensors take at a step."""
        total = 0.0
        for tensor, weights in self._iterate("measuring sizes"):
            every = max(1, min(_SAMPLE, len(weights) // _MIN_SAMPLE)) | 1
            rounded = self._round(tensor, weights[::every], step, every=every, passes=2)
            self._parameters[tensor.name] = rounded.parameters
            total += _estimate_bytes(rounded, len(weights))
        self.curve.append((step, total))
        return total

    def round_all(self, step: float) -> Solution:
        """Round all tensors; those that the work folder contains are loaded."""
        return Solution(step, tuple(self._fit(tensor, step) for tensor in self.tensors))

    def solve(self, nbytes: int, other: int, measure: Measure) -> Solution:
        """Return a solution whose files have at most `nbytes`, and hardly less.

        Args:
            nbytes: maximum size of all files.
            other: about how much of it other tensors and headers take.
            measure: returns the size of all files with a solution.
        """
        step = self.find_step(nbytes * _AIM - other)
        below: tuple[int, Solution] | None = None
        above: tuple[int, Solution] | None = None
        tried: list[tuple[float, float]] = []
        for _ in range(_MAX_PASSES):
            solution = self.round_all(step)
            size = measure(solution)
            tried.append((step, float(size)))
            _LOG.info("step %.6g: %d of %d bytes", step, size, nbytes)
            if size <= nbytes and (below is None or size > below[0]):
                below = size, solution
            if size > nbytes and (above is None or size < above[0]):
                above = size, solution
            if nbytes * (1 - TOLERANCE) <= size <= nbytes:
                return solution
            step = _correct(tried, nbytes * _AIM, self.items)
        if below is None:
            smallest = format_bytes(int(min(size for _, size in tried)))
            raise ConfigError(
                f"a budget of {format_bytes(nbytes)} is too small: the smallest version that was"
                f" found takes {smallest}"
            )
        if above is None:
            return below[1]
        # Sizes of small models change by leaps.
        mixed = _mix(below[1], above[1], nbytes - below[0])
        return mixed if measure(mixed) <= nbytes else below[1]

    @cached_property
    def _unit(self) -> float:
        """Step at which the RMS of weights is one step of their own, as a geometric mean."""
        total, items = 0.0, 0
        for tensor, weights in self._iterate(None):
            if tensor.inputs is None:
                continue
            rows, columns = self._tolerances(tensor, self._factor(tensor))
            rms = float(weights.double().square().mean().sqrt())
            if rms:
                scale = float(rows.log2().mean() + columns.log2().mean())
                total += (math.log2(rms) - scale) * tensor.spec.numel
                items += tensor.spec.numel
        return float(2 ** (total / items)) if items else 1.0

    def _iterate(self, what: str | None) -> Iterator[tuple[FitTensor, Tensor]]:
        # In the order of their inputs, so that each factor is loaded once.
        for tensor in sorted(self.tensors, key=lambda x: x.inputs or ""):
            yield tensor, self._read(tensor)
            if what and self.progress:
                self.progress(what, tensor.spec.numel)

    def _read(self, tensor: FitTensor) -> Tensor:
        try:
            return tensor.codec.to_matrix(tensor.read())
        except ConfigError as error:
            raise ConfigError(f"{tensor.name}: {error}") from error

    def _factor(self, tensor: FitTensor) -> InputFactor | None:
        return None if tensor.inputs is None else self.statistics.load_factor(tensor.inputs)

    def _tolerances(self, tensor: FitTensor, factor: InputFactor | None) -> tuple[Tensor, Tensor]:
        """Return the relative steps of rows and columns of a tensor with statistics."""
        g = tensor.sensitivity
        assert g is not None, "a tensor with statistics"
        assert factor is not None, "a tensor with statistics"
        return (g + tensor.smoothing * g.mean()).rsqrt(), factor.tolerance

    def _round(
        self, tensor: FitTensor, weights: Tensor, step: float, *, every: int, passes: int
    ) -> Rounded:
        factor = self._factor(tensor)
        keep_zeros = float((weights == 0).float().mean()) >= _ZEROS
        if factor is None:
            rms = float(weights.double().square().mean().sqrt()) or 1.0
            rows, columns = weights.shape
            # As coarse, relative to its weights, as the average of the other tensors. Without
            # knowledge of inputs, saving bits at the cost of error does harm.
            size = max(rms * step / self._unit, float(weights.abs().max()) / _MAX_INTEGER)
            steps = Steps(
                torch.full((rows,), size),
                torch.ones(columns),
                price_of_bit=0.0,
                keep_zeros=keep_zeros,
                row_fineness=self.row_fineness,
            )
        else:
            row_steps, column_steps = self._tolerances(tensor, factor)
            row_steps = row_steps[::every]
            largest = (weights.abs() / row_steps[:, None]).amax(0)
            steps = Steps(
                row_steps,
                torch.maximum(column_steps * step, largest / _MAX_INTEGER),
                factor=factor.factor,
                order=factor.order,
                price_of_bit=self.price_of_bit,
                keep_zeros=keep_zeros,
                row_fineness=self.row_fineness,
            )
        known = self._parameters.get(tensor.name)
        if known is None:
            return round_matrix(weights, steps, self.each, passes=max(passes, 2))
        return round_matrix(weights, steps, self.each, passes=passes, parameters=known)

    def _fit(self, tensor: FitTensor, step: float) -> FittedTensor:
        fitted = self._load(tensor, step)
        if fitted is None:
            weights = self._read(tensor)
            # Prices are those of the samples, so that the size depends on the step alone.
            rounded = self._round(tensor, weights, step, every=1, passes=1)
            encoded = Encoded(tensor.codec, tensor.spec, rounded.encode(self.each))
            size = count_stored_bytes(tensor.name, encoded, self.each)
            loss = self._predict_loss(tensor, weights, encoded)
            fitted = FittedTensor(tensor.name, encoded, size, loss, tensor.note)
            self._store(fitted, step)
        if self.progress:
            self.progress("rounding", tensor.spec.numel)
        return fitted

    def _store(self, fitted: FittedTensor, step: float) -> None:
        """Store a tensor in the work folder, in place of the one with another step."""
        if self.work is None:
            return
        loss = math.nan if fitted.loss is None else fitted.loss
        parts = {key: x for key, x in fitted.encoded.parts.items() if isinstance(x, Tensor)}
        # The facts are in the same file, which is replaced as a whole.
        facts = torch.tensor(
            [step, self.row_fineness, fitted.stored_bytes, loss], dtype=torch.float64
        )
        self.work.store(f"{_ROUNDED}{fitted.name}", {**parts, _FACTS: facts})

    def _load(self, tensor: FitTensor, step: float) -> FittedTensor | None:
        name = f"{_ROUNDED}{tensor.name}"
        if self.work is None or not self.work.has(name):
            return None
        parts = self.work.load(name)
        known_step, fineness, size, loss = parts.pop(_FACTS).tolist()
        if (known_step, fineness) != (step, self.row_fineness):
            return None
        encoded = Encoded(tensor.codec, tensor.spec, parts)
        known_loss = None if math.isnan(loss) else loss
        return FittedTensor(tensor.name, encoded, int(size), known_loss, tensor.note)

    def _predict_loss(self, tensor: FitTensor, weights: Tensor, encoded: Encoded) -> float | None:
        """Return the divergence that the errors of a tensor add: `½ Σᵢ Gᵢ eᵢ A eᵢᵀ`."""
        factor = self._factor(tensor)
        if factor is None:
            return None
        assert tensor.sensitivity is not None, "a tensor with statistics"
        errors = weights - tensor.codec.to_matrix(decode(encoded, self.each))
        # A is (Uᵀ U)⁻¹ in the order of the columns, so e A eᵀ = |e U⁻¹|².
        scaled = torch.linalg.solve_triangular(
            factor.factor, errors[:, factor.order.long()], upper=True, left=False
        )
        return float(0.5 * (tensor.sensitivity * scaled.square().sum(1)).sum())


def count_stored_bytes(name: str, encoded: Encoded, each: Each) -> int:
    """Return the size of the blob of a tensor."""
    return sum(piece.spec.nbytes for piece in pack_encoded(name, encoded, each).pieces)


def _mix(small: Solution, large: Solution, spare: int) -> Solution:
    """Return a solution with tensors of a larger one, as many as fit in the spare bytes."""
    chosen = []
    for a, b in zip(small.tensors, large.tensors, strict=True):
        if 0 < b.stored_bytes - a.stored_bytes <= spare:
            spare -= b.stored_bytes - a.stored_bytes
            a = b
        chosen.append(a)
    return replace(small, tensors=tuple(chosen))


def _estimate_bytes(rounded: Rounded, rows: int) -> float:
    """Return about how many bytes a tensor takes, given a sample of its rows."""
    sampled, columns = rounded.integers.shape
    share = rows / sampled
    chunks = math.ceil(rows * columns / (1 << 18))
    side = _SIDE_BYTES * (rows + columns)
    return rounded.bits * share / 8 + side + chunks * _CHUNK_OVERHEAD + _BLOB_OVERHEAD


def _interpolate(curve: Sequence[tuple[float, float]], nbytes: float) -> float:
    """Return the step for a size: bytes are nearly linear in the logarithm of the step."""
    points = sorted((size, math.log2(step)) for step, size in curve)
    if len(points) == 1:
        return float(2 ** points[0][1])
    above = next((i for i, (size, _) in enumerate(points) if size >= nbytes), len(points) - 1)
    i = min(max(above, 1), len(points) - 1)
    (a, x), (b, y) = points[i - 1], points[i]
    found = y if a == b else x + (nbytes - a) * (y - x) / (b - a)
    # Not far beyond what is known: at some point, sizes hardly change.
    known = [step for _, step in points]
    return float(2 ** min(max(found, min(known) - _MAX_LEAP), max(known) + _MAX_LEAP))


def _correct(tried: Sequence[tuple[float, float]], nbytes: float, items: int) -> float:
    """Return the next step to try, from the sizes of full passes."""
    if len({size for _, size in tried[-2:]}) > 1:
        return _interpolate(tried[-2:], nbytes)
    step, size = tried[-1]
    # Several steps may have the same size: leave them by larger and larger leaps.
    leap = 2 ** (sum(size == known for _, known in tried) - 1)
    return step * float(2 ** (leap * 8 * (size - nbytes) / items / _BITS_PER_OCTAVE))


def scale_step(fitted: Solution, loss: float, target: float) -> float:
    """Return the step for a divergence of `target`, which grows with the square of the step."""
    ratio = max(min(target / max(loss, 1e-12), 16.0), 1 / 16.0)
    return fitted.step * math.sqrt(ratio)


__all__ = ["TOLERANCE", "FitTensor", "FittedTensor", "Fitter", "Solution", "scale_step"]
