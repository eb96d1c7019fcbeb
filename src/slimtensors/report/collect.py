"""Look at every tensor of a model: how it is stored, what is in it, and what it has lost."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.summary import TensorSummary
from slimtensors.checkpoint import Point, points
from slimtensors.checkpoint.store import StoredState
from slimtensors.codecs.statistics import count_zeros
from slimtensors.errors import FormatError, MismatchError
from slimtensors.folder.compress import Keep
from slimtensors.parallel import Each, Workers
from slimtensors.report.data import (
    Link,
    Report,
    TensorReport,
    Variant,
    histogram,
    read_recipe,
    sample,
)
from slimtensors.report.sources import ReportSource, TensorHandle, open_source
from slimtensors.storage import StrPath
from slimtensors.tensor import Spec, bitwise_equal, dtype_name, norm, relative_distance

_BINS, _FEW_BINS, _MANY = 48, 16, 800
"""Bars of a histogram, and those where so many tensors would make the page heavy."""


def collect(
    source: StrPath,
    *,
    against: StrPath | None = None,
    keep: Keep = lambda name: True,
    threads: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Look at a file or a folder, and return the report; everything is read twice.

    With the original in `against`, errors are measured, and not only those that the file tells.
    `progress` counts stored bytes.
    """
    title = Path(source).resolve().name if "://" not in str(source) else str(source)
    variant = collect_variant(
        source, title, against=against, keep=keep, threads=threads, progress=progress
    )
    return replace(new_report(title, [variant]), recipe=read_recipe(source))


def new_report(title: str, variants: list[Variant]) -> Report:
    """Return a report that was made now, by this version."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return Report(title, now, version("slimtensors"), variants)


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
    """Look at a file or a folder, as one way of several to store the same model."""
    here = open_source(source, partial(Archive.bounds, threads=threads, progress=progress))
    there = open_source(against) if against is not None else None
    chosen = [held for held in here.tensors.values() if keep(held.stored.name)]
    bins = _BINS if len(chosen) <= _MANY else _FEW_BINS
    found: dict[str, _Seen] = {}
    with Workers(threads) as workers:

        def one(held: TensorHandle) -> _Seen:
            return _look(held, there, workers.each, bins)

        seen = workers.in_order(one, chosen, lambda held: held.stored.dense_bytes)
        for held, result in zip(chosen, seen, strict=True):
            found[held.stored.name] = result
            if progress:
                progress(held.stored.stored_bytes)
    tensors = [result.report for result in found.values()]
    tensors += [
        _tied(found[home].report, tied, home) for tied, home in here.tied.items() if home in found
    ]
    return Variant(name, tensors, about, _together(list(found.values())), measured or {})


@dataclass(frozen=True)
class _Seen:
    """A tensor that was looked at."""

    report: TensorReport
    norm: float


def _look(held: TensorHandle, original: ReportSource | None, each: Each, bins: int) -> _Seen:
    x = held.load(each)
    spec = Spec.of(x)
    zeros = count_zeros(x) if not x.is_quantized else None
    values = sample(x)
    stored = replace(
        held.stored,
        dtype=dtype_name(spec.dtype),
        shape=spec.shape,
        dense_bytes=spec.nbytes,
        bound=held.bound_bits / spec.numel if spec.numel else 0.0,
    )
    exact: bool | None = True if not held.is_lossy else None if stored.error is None else False
    errors = None
    if original is not None:
        given = _given(original, stored, each)
        exact = _same(x, given)
        stored = replace(stored, error=None if exact else _distance(x, given))
        before = sample(given)
        if values is not None and before is not None and not exact:
            errors = histogram(values - before, bins)
    report = TensorReport(
        stored,
        held.plan,
        exact,
        (zeros.zero + zeros.negative) / spec.numel if zeros and spec.numel else 0.0,
        histogram(values, bins),
        errors,
    )
    return _Seen(report, norm(x) if x.is_floating_point() and x.element_size() > 1 else 0.0)


def _given(original: ReportSource, stored: TensorSummary, each: Each) -> Tensor:
    held = original.find(stored.name)
    if held is None:
        raise MismatchError(f"{original.path}: holds no {stored.name}; it is another model")
    given = held.load(each)
    if tuple(given.shape) != stored.shape:
        shapes = f"{tuple(given.shape)}, not {stored.shape}"
        raise MismatchError(f"{original.path}: {stored.name}: has the shape {shapes}")
    return given


def _same(x: Tensor, given: Tensor) -> bool:
    if x.is_quantized:
        return x.dtype == given.dtype and torch.equal(x, given)
    return bitwise_equal(x, given)


def _distance(x: Tensor, given: Tensor) -> float | None:
    if x.is_quantized or x.is_complex() or x.dtype.itemsize != x.element_size():
        return None
    found = relative_distance(x, given)
    return found if math.isfinite(found) else None


def _tied(report: TensorReport, name: str, home: str) -> TensorReport:
    return replace(report, stored=replace(report.stored, name=name).tied_to(home))


def _together(seen: list[_Seen]) -> float | None:
    """Return the error of all tensors as if they were one; none if that of one is not known."""
    if any(one.report.is_exact is None for one in seen):
        return None
    whole = math.hypot(*(one.norm for one in seen))
    lost = math.hypot(*(one.norm * (one.report.stored.error or 0.0) for one in seen))
    return lost / whole if whole and math.isfinite(whole) else 0.0


def collect_run(run: StrPath, *, threads: int | None = None) -> Report:
    """Look at a folder of checkpoints, and return the report."""
    found = points(run)
    if not found:
        raise FormatError(f"{run}: holds no checkpoint")
    newest = found[-1]
    variant = collect_variant(newest.path, newest.name, threads=threads)
    return replace(new_report(Path(run).resolve().name, [variant]), checkpoints=links(run))


def links(run: StrPath) -> list[Link]:
    """Return the checkpoints of a run, the newest last."""
    return [_link(point) for point in points(run)]


def _link(point: Point) -> Link:
    about, state = point.manifest, StoredState(point.path)
    return Link(
        point.name,
        about.step,
        about.base.name if about.base else None,
        about.profile,
        about.bytes,
        sum(state.spec(name).nbytes for name in state.names()),
        about.created,
        dict(about.metrics),
    )
