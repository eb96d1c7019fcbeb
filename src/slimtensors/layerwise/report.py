"""What was done to each layer of a model."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from slimtensors.layerwise.gptq import Rounded
from slimtensors.layerwise.hessian import Change
from slimtensors.tensor import Json


@dataclass(frozen=True)
class LayerReport:
    """How a layer was quantized or pruned, and what that does to its outputs."""

    name: str
    method: str
    """What did it: `gptq`, or `rtn` where that was asked for or fallen back to."""
    error: float | None = None
    """Relative square error of the outputs, on what was seen; none if nothing was."""
    nearest_error: float | None = None
    """The same, had the weights been rounded to nearest, or pruned by magnitude."""
    mse: float | None = None
    """Mean square error of the outputs."""
    cosine: float | None = None
    """Between outputs before and after."""
    tokens: int = 0
    seconds: float = field(default=0.0, compare=False)
    notes: tuple[str, ...] = ()
    """What did not go as asked, and what was done instead."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        return asdict(self) | {"notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Json) -> "LayerReport":
        """Read the JSON form."""
        return cls(**data | {"notes": tuple(data["notes"])})


@dataclass(frozen=True)
class ModelReport:
    """What was done to a model."""

    layers: tuple[LayerReport, ...]
    results: Mapping[str, Rounded]
    """The weights on their grid, which the model now has, and what turns codes into them."""
    notes: tuple[str, ...] = ()
    """What concerns more than one layer."""

    def to_json(self) -> Json:
        """Return all but the tensors."""
        return {"layers": [layer.to_json() for layer in self.layers], "notes": list(self.notes)}


@dataclass(frozen=True)
class LayerResult:
    """How one matrix went."""

    method: str
    """What was used, which may be what was fallen back to."""
    tokens: int = 0
    notes: Sequence[str] = ()
    change: Change = field(default_factory=Change)
    simplest: Change = field(default_factory=Change)
    """What rounding to nearest, or pruning by magnitude, would have changed."""


def layer_report(
    name: str, method: str, told: Sequence[LayerResult], *, begin: float
) -> LayerReport:
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
