"""Load every tensor of a model and measure sizes, sparsity, value histograms and errors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.summary import TensorSummary
from slimtensors.checkpoint import points
from slimtensors.checkpoint.run import RunPoint
from slimtensors.checkpoint.store import StoredState
from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import FormatError, MismatchError
from slimtensors.folder.compress import Keep
from slimtensors.parallel import Each, Workers
from slimtensors.report.data import (
    CheckpointReport,
    Histogram,
    Report,
    TensorReport,
    Variant,
    read_fit_report,
    read_quantization_report,
    read_recipe,
)
from slimtensors.report.sources import ModelTensors, StoredTensor, open_tensors
from slimtensors.storage import StrPath
from slimtensors.tensor import Spec, bitwise_equal, dtype_name, norm, relative_distance

_BINS, _COARSE_BINS, _MANY_TENSORS = 48, 16, 800
"""Bins of a histogram; the coarse ones keep the page small if there are many tensors."""
_SAMPLE_SIZE = 1 << 16
"""Items per tensor in a histogram."""
_HISTOGRAM_SIGMAS = 4.0
"""Histogram range in standard deviations; outliers count in the outermost bins."""

_FLOATS = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_FLOAT8 = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_INTEGERS = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}


def collect(
    source: StrPath,
    *,
    against: StrPath | None = None,
    keep: Keep = lambda name: True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Return a report on a file or folder.

    With the original model in `against`, errors are measured; otherwise they are those recorded
    in the files. All data is read twice. `progress` counts stored bytes.
    """
    title = _name_source(source)
    variant = collect_variant(
        source, title, against=against, keep=keep, threads=threads, progress=progress
    )
    is_fitted = any("trellis" in tensor.stored.codec for tensor in variant.tensors)
    return replace(
        new_report(title, [variant]),
        recipe=read_recipe(source),
        quantization=read_quantization_report(source),
        fit=read_fit_report(source) if is_fitted else None,
    )


def collect_variant(
    source: StrPath,
    name: str,
    *,
    about: str = "",
    measured: Mapping[str, float] | None = None,
    against: StrPath | None = None,
    keep: Keep = lambda name: True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Variant:
    """Return a file or folder as one variant of a model, for a report with several of them."""
    model = open_tensors(source, partial(Archive.bounds, threads=threads, progress=progress))
    original = open_tensors(against) if against is not None else None
    tensors = [tensor for tensor in model.tensors.values() if keep(tensor.summary.name)]
    bins = _BINS if len(tensors) <= _MANY_TENSORS else _COARSE_BINS
    measurements: dict[str, _Measurement] = {}
    with Workers(threads) as workers:

        def measure(tensor: StoredTensor) -> _Measurement:
            return _measure(tensor, original, workers.each, bins)

        results = workers.in_order(measure, tensors, lambda tensor: tensor.summary.dense_bytes)
        for tensor, result in zip(tensors, results, strict=True):
            measurements[tensor.summary.name] = result
            if progress:
                progress(tensor.summary.stored_bytes)
    reports = [result.report for result in measurements.values()]
    reports += [
        _tied_report(measurements[target].report, tied, target)
        for tied, target in model.tied.items()
        if target in measurements
    ]
    return Variant(name, reports, about, _total_error(list(measurements.values())), measured or {})


def collect_run(run: StrPath, *, threads: int | None = None) -> Report:
    """Return a report on a folder of checkpoints, with the tensors of the newest."""
    found = points(run)
    if not found:
        raise FormatError(f"{run}: no checkpoint found")
    newest = found[-1]
    variant = collect_variant(str(newest.path), newest.name, threads=threads)
    report = new_report(_name_source(run), [variant])
    return replace(report, checkpoints=[_checkpoint_report(point) for point in found])


def _name_source(source: StrPath) -> str:
    return Path(source).resolve().name if "://" not in str(source) else str(source)


def collect_checkpoints(run: StrPath) -> list[CheckpointReport]:
    """Return the checkpoints of a run, the newest last."""
    return [_checkpoint_report(point) for point in points(run)]


def new_report(title: str, variants: list[Variant]) -> Report:
    """Return a report with the current time and version."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(title, now, version("slimtensors"), variants)


def _checkpoint_report(point: RunPoint) -> CheckpointReport:
    manifest, state = point.manifest, StoredState(point.path)
    return CheckpointReport(
        point.name,
        manifest.step,
        manifest.base.name if manifest.base else None,
        manifest.profile,
        manifest.bytes,
        sum(state.spec(name).nbytes for name in state.names()),
        manifest.created,
        dict(manifest.metrics),
    )


@dataclass(frozen=True)
class _Measurement:
    """The report on a tensor, and its norm."""

    report: TensorReport
    norm: float


def _measure(
    tensor: StoredTensor, original: ModelTensors | None, each: Each, bins: int
) -> _Measurement:
    x = tensor.load(each)
    spec = Spec.of(x)
    zeros = count_zeros(x) if not x.is_quantized else None
    values = _sample(x)
    summary = replace(
        tensor.summary,
        dtype=dtype_name(spec.dtype),
        shape=spec.shape,
        dense_bytes=spec.nbytes,
        bound=tensor.entropy_bits / spec.numel if spec.numel else 0.0,
    )
    is_exact: bool | None = True
    if tensor.is_lossy:
        is_exact = None if summary.error is None else False
    errors = None
    if original is not None:
        expected = _load_original(original, summary, each)
        is_exact = _is_equal(x, expected)
        summary = replace(summary, error=None if is_exact else _relative_error(x, expected))
        expected_values = _sample(expected)
        if values is not None and expected_values is not None and not is_exact:
            errors = _histogram(values - expected_values, bins)
    report = TensorReport(
        summary,
        tensor.plan,
        is_exact,
        (zeros.zero + zeros.negative) / spec.numel if zeros and spec.numel else 0.0,
        _histogram(values, bins),
        errors,
    )
    return _Measurement(report, norm(x) if x.is_floating_point() and x.element_size() > 1 else 0.0)


def _load_original(original: ModelTensors, summary: TensorSummary, each: Each) -> Tensor:
    tensor = original.find(summary.name)
    if tensor is None:
        raise MismatchError(f"{original.path}: tensor {summary.name} not found; not the original")
    x = tensor.load(each)
    if tuple(x.shape) != summary.shape:
        shapes = f"expected shape {summary.shape}, got {tuple(x.shape)}"
        raise MismatchError(f"{original.path}: {summary.name}: {shapes}")
    return x


def _is_equal(x: Tensor, y: Tensor) -> bool:
    if x.is_quantized:
        return x.dtype == y.dtype and torch.equal(x, y)
    return bitwise_equal(x, y)


def _relative_error(x: Tensor, expected: Tensor) -> float | None:
    """Return the relative RMS error, or None if it is not defined."""
    if x.is_quantized or x.is_complex() or x.dtype.itemsize != x.element_size():
        return None
    error = relative_distance(x, expected)
    return error if math.isfinite(error) else None


def _tied_report(report: TensorReport, name: str, target: str) -> TensorReport:
    return replace(report, stored=replace(report.stored, name=name).tied_to(target))


def _total_error(measurements: list[_Measurement]) -> float | None:
    """Return the relative RMS error over all tensors, or None if one is unknown."""
    if any(one.report.is_exact is None for one in measurements):
        return None
    total = math.hypot(*(one.norm for one in measurements))
    error = math.hypot(*(one.norm * (one.report.stored.error or 0.0) for one in measurements))
    return error / total if total and math.isfinite(total) else 0.0


def _sample(x: Tensor) -> Tensor | None:
    """Return items of `x` at fixed random places as float64, or None if it is not numeric."""
    if x.is_quantized:
        x = x.dequantize()
    if x.dtype not in _FLOATS | _FLOAT8 | _INTEGERS or not x.numel():
        return None
    flat = x.reshape(-1)
    if len(flat) > _SAMPLE_SIZE:
        random = torch.Generator().manual_seed(0)
        at = torch.randint(len(flat), (_SAMPLE_SIZE,), generator=random)
        # torch cannot index float8 tensors, only their bytes
        flat = flat.view(torch.uint8)[at].view(x.dtype) if x.dtype in _FLOAT8 else flat[at]
    return flat.double()


def _histogram(values: Tensor | None, bins: int) -> Histogram | None:
    """Return a histogram of the finite nonzero values, or None if there are too few."""
    if values is None:
        return None
    kept = values[torch.isfinite(values) & (values != 0)].numpy()
    if len(kept) < 2:
        return None
    mean, deviation = float(kept.mean()), float(kept.std())
    low = max(float(kept.min()), mean - _HISTOGRAM_SIGMAS * deviation)
    high = min(float(kept.max()), mean + _HISTOGRAM_SIGMAS * deviation)
    if not np.isfinite(high - low) or not high - low > abs(mean) * 1e-12:
        return None
    counts, _ = np.histogram(kept.clip(low, high), bins, (low, high))
    return Histogram(low, high, tuple(counts.tolist()))
