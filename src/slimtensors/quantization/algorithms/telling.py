"""Tell how a layer went whose matrices were done one by one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from slimtensors.quantization.algorithms.change import Change
from slimtensors.quantization.algorithms.report import LayerReport


@dataclass(frozen=True)
class Told:
    """How one matrix went."""

    method: str
    """What was used, which may be what was fallen back to."""
    tokens: int = 0
    notes: Sequence[str] = ()
    change: Change = field(default_factory=Change)
    simplest: Change = field(default_factory=Change)
    """What rounding to nearest, or pruning by magnitude, would have changed."""


def layer_report(name: str, method: str, told: Sequence[Told], *, begin: float) -> LayerReport:
    """Put together how the matrices of a layer went, which was begun at `time.perf_counter()`."""
    change = Change.of_all(each.change for each in told)
    used = {each.method for each in told}
    return LayerReport(
        name,
        method=method if method in used else used.pop(),
        error=change.relative,
        nearest_error=Change.of_all(each.simplest for each in told).relative,
        mse=change.mse,
        cosine=change.cosine,
        tokens=sum(each.tokens for each in told),
        seconds=time.perf_counter() - begin,
        notes=_gathered([each.notes for each in told]),
    )


def _gathered(notes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Say of which experts each note is."""
    if len(notes) == 1:
        return tuple(notes[0])
    which: dict[str, list[str]] = {}
    for i, told in enumerate(notes):
        for text in told:
            which.setdefault(text, []).append(str(i))
    return tuple(f"expert {', '.join(own)} of {len(notes)}: {x}" for x, own in which.items())
