"""Which checkpoint the next one of a run is a difference from, and what becomes of old ones."""

from collections.abc import Sequence

from slimtensors.checkpoint.commit import remove_folder
from slimtensors.checkpoint.io import FlatState, Saved, save_flat
from slimtensors.checkpoint.reading import StoredState
from slimtensors.checkpoint.run import Point

HISTORY = "history"
_TOO_LARGE = 0.85
"""A delta that takes more than this of its keyframe is no longer worth needing another file."""
_HISTORY_GROUP = 8


def resumable(points: Sequence[Point]) -> list[Point]:
    """Return the checkpoints that hold all that training needs."""
    return [point for point in points if point.manifest.profile != HISTORY]


def next_base(points: Sequence[Point], how: str | None, since: int, every: int) -> Point | None:
    """Choose the base of the next checkpoint; none if it is to stand alone.

    `auto`: the last one that stands alone, unless there have been `every` saves `since` it or
    deltas have grown too large. `chain`: the last one, as long as the chain is short enough.
    """
    found = resumable(points)
    full = [point for point in found if point.manifest.base is None]
    if how is None or not full or since + 1 >= every:
        return None
    if how == "chain":
        return found[-1]
    is_delta = found[-1].manifest.base is not None
    if is_delta and found[-1].manifest.bytes > _TOO_LARGE * full[-1].manifest.bytes:
        return None
    return full[-1]


def saves_since_keyframe(points: Sequence[Point]) -> int:
    """Count the checkpoints after the last one that stands alone."""
    full = [i for i, point in enumerate(points) if point.manifest.base is None]
    return len(points) - 1 - full[-1] if full else 0


def demote(point: Point, points: Sequence[Point], *, threads: int | None = None) -> Saved:
    """Replace a checkpoint by its weights in bf16, as a difference from another such if there is.

    The small one is complete before the old one goes.
    """
    state = FlatState.of(StoredState(point.path).load_state(threads=threads))
    path = point.path.with_name(f"{point.name}-{HISTORY}")
    base = _history_base(points)
    saved = save_flat(
        state, path, base=base.path if base else None, profile=HISTORY, threads=threads
    )
    remove_folder(point.path)
    return saved


def _history_base(points: Sequence[Point]) -> Point | None:
    found = [point for point in points if point.manifest.profile == HISTORY]
    alone = [i for i, point in enumerate(found) if point.manifest.base is None]
    if not alone or len(found) - alone[-1] >= _HISTORY_GROUP:
        return None
    return found[alone[-1]]
