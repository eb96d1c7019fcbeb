"""Reports: how each layer was changed, and by how much its outputs changed."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass, field, replace

import torch
from torch import Tensor

from slimtensors.errors import shorten_list
from slimtensors.layerwise.gptq import Rounded
from slimtensors.tensor import Json, ceil_div

_SAMPLED_ROWS = 128
"""Rows of a weight that are compared at most."""

_LISTED_NAMES = 3
"""Names of layers that a summary lists at most."""


@dataclass(frozen=True)
class LayerReport:
    """How a layer was quantized or pruned, and how that changes its outputs."""

    name: str
    method: str
    """Method that was used: `gptq`, or `rtn` if requested or used as a fallback."""
    error: float | None = None
    """Relative squared error of the outputs on the calibration data; None without data."""
    nearest_error: float | None = None
    """The same for the simplest method: rounding to nearest, or pruning by magnitude."""
    mse: float | None = None
    """Mean squared error of the outputs."""
    cosine: float | None = None
    """Cosine similarity of the outputs before and after."""
    tokens: int = 0
    seconds: float = field(default=0.0, compare=False)
    notes: tuple[str, ...] = ()
    """Deviations from the request, and fallbacks that were used."""
    missing_inputs: str | None = None
    """Why the requested method could not be used for lack of inputs; None if it was used."""

    def without_inputs(self, reason: str, fallback: str) -> "LayerReport":
        """Return the report of a layer whose inputs were not recorded."""
        notes = (f"{reason}: {fallback}", *self.notes)
        return replace(self, missing_inputs=reason, notes=notes)

    def to_json(self) -> Json:
        """Return the JSON form."""
        return asdict(self) | {"notes": list(self.notes)}

    @classmethod
    def from_json(cls, data: Json) -> "LayerReport":
        """Read the JSON form."""
        return cls(**data | {"notes": tuple(data["notes"])})


def summarize_missing_inputs(layers: Sequence[LayerReport]) -> list[str]:
    """Return a sentence for each reason why layers were rewritten without their inputs."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        if layer.missing_inputs is not None:
            names.setdefault(layer.missing_inputs, []).append(layer.name)
    return [
        f"{len(found)} of {len(layers)} layers have no recorded inputs: {reason}"
        f" ({shorten_list(found, _LISTED_NAMES)})"
        for reason, found in names.items()
    ]


@dataclass(frozen=True)
class ModelReport:
    """How a model was quantized."""

    layers: tuple[LayerReport, ...]
    results: Mapping[str, Rounded]
    """Quantized weights and their scales by layer name; the model contains the same weights."""
    notes: tuple[str, ...] = ()
    """Notes that concern more than one layer."""

    def to_json(self) -> Json:
        """Return everything except the tensors."""
        return {"layers": [layer.to_json() for layer in self.layers], "notes": list(self.notes)}


@dataclass(frozen=True)
class OutputChange:
    """Products of outputs before and after a change, summed over outputs, averaged over inputs."""

    outputs: int = 0
    before: float = 0.0
    """Squared outputs before."""
    after: float = 0.0
    """Squared outputs after."""
    product: float = 0.0
    """Outputs before times outputs after."""
    error: float = 0.0
    """Squared difference."""

    @classmethod
    def measure(cls, before: Tensor, after: Tensor, hessian: Tensor) -> "OutputChange":
        """Compare two weights `[outputs, inputs]` on a sample of their rows."""
        rows = slice(None, None, ceil_div(len(before), _SAMPLED_ROWS) or 1)
        old, new = before[rows].float(), after[rows].float()
        old_outputs, new_outputs = old @ hessian, new @ hessian

        def dot(x: Tensor, y: Tensor) -> float:
            return float((x * y).sum(dtype=torch.float64))

        return cls(
            len(old),
            dot(old_outputs, old),
            dot(new_outputs, new),
            dot(old_outputs, new),
            dot(old_outputs - new_outputs, old - new),
        )

    @classmethod
    def total(cls, changes: Iterable["OutputChange"]) -> "OutputChange":
        """Add up the changes of several weights."""
        table = [astuple(each) for each in changes]
        return cls(*(sum(column) for column in zip(*table, strict=True))) if table else cls()

    @property
    def mse(self) -> float | None:
        """Mean squared error per output and input."""
        return self.error / self.outputs if self.outputs else None

    @property
    def relative_error(self) -> float | None:
        """Squared error relative to the squared outputs before."""
        return self.error / self.before if self.before else None

    @property
    def cosine(self) -> float | None:
        """Cosine similarity of the outputs before and after."""
        if not (self.before > 0 and self.after > 0):
            return None
        cosine: float = self.product / (self.before * self.after) ** 0.5
        return cosine


@dataclass(frozen=True)
class MatrixReport:
    """How one matrix of a layer was changed."""

    method: str
    """Method that was used, which may be a fallback."""
    tokens: int = 0
    notes: Sequence[str] = ()
    change: OutputChange = field(default_factory=OutputChange)
    baseline: OutputChange = field(default_factory=OutputChange)
    """Change that rounding to nearest, or pruning by magnitude, would have caused."""


def combine_matrices(
    name: str, method: str, matrices: Sequence[MatrixReport], *, started: float
) -> LayerReport:
    """Return the report of a layer from those of its matrices.

    `started` is the value of `time.perf_counter()` when work on the layer began.
    """
    change = OutputChange.total(each.change for each in matrices)
    used = {each.method for each in matrices}
    return LayerReport(
        name,
        method=method if method in used else used.pop(),
        error=change.relative_error,
        nearest_error=OutputChange.total(each.baseline for each in matrices).relative_error,
        mse=change.mse,
        cosine=change.cosine,
        tokens=sum(each.tokens for each in matrices),
        seconds=time.perf_counter() - started,
        notes=_merge_notes([each.notes for each in matrices]),
    )


def _merge_notes(notes: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Merge equal notes of several experts, prefixed with the experts they apply to."""
    if len(notes) == 1:
        return tuple(notes[0])
    experts: dict[str, list[str]] = {}
    for i, texts in enumerate(notes):
        for text in texts:
            experts.setdefault(text, []).append(str(i))
    return tuple(f"expert {', '.join(ids)} of {len(notes)}: {x}" for x, ids in experts.items())
