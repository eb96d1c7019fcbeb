"""Look at a run: the checkpoints and what they need, and the tensors of the newest."""

from dataclasses import replace
from pathlib import Path

from slimtensors.checkpoint import Point, points
from slimtensors.checkpoint.reading import StoredState
from slimtensors.container import StrPath
from slimtensors.errors import FormatError
from slimtensors.report.collect import collect_variant, new_report
from slimtensors.report.data import Link, Report


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
