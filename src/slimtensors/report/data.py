"""The data of a report as dataclasses, and its JSON file (`docs/schemas/report.json`)."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any, TypeVar

from slimtensors.archive.summary import QuantizationSummary, TensorSummary
from slimtensors.errors import CorruptFileError, UnsupportedVersionError, report_malformed
from slimtensors.folder.compress import is_model_folder
from slimtensors.folder.config_json import FIT_REPORT, QUANTIZATION_REPORT, resolve_folder
from slimtensors.layerwise.report import LayerReport
from slimtensors.recipe.report import REPORT_FILE, LayerState
from slimtensors.storage import StrPath, local_path, locate, read_bytes, write_json
from slimtensors.tensor import Json

FORMAT, VERSION = "slimtensors report", 1

T = TypeVar("T")


@dataclass(frozen=True)
class Histogram:
    """Counts of sampled items in bins of equal width."""

    low: float
    high: float
    counts: tuple[int, ...]


@dataclass(frozen=True)
class TensorReport:
    """How one tensor is stored, and statistics of its values."""

    stored: TensorSummary
    plan: Json | None
    """The tree of codecs, or None if stored plain."""
    is_exact: bool | None
    """Whether it is bitwise equal to the original, or None if unknown."""
    sparsity: float
    """Fraction of zeros."""
    weights: Histogram | None = None
    """Nonzero values."""
    errors: Histogram | None = None
    """Nonzero differences from the original."""

    def to_json(self) -> Json:
        """Return a JSON object."""
        return {
            **asdict(self.stored),
            "shape": list(self.stored.shape),
            "file": PurePath(self.stored.file).name,
            "error": _finite_or_none(self.stored.error),
            "bound": None if self.stored.bound is None else round(self.stored.bound, 4),
            "plan": self.plan,
            "is_exact": self.is_exact,
            "sparsity": round(self.sparsity, 6),
            "weights": _histogram_to_json(self.weights),
            "errors": _histogram_to_json(self.errors),
        }

    @classmethod
    def from_json(cls, data: Json) -> "TensorReport":
        """Parse the output of `to_json`."""
        summary = {key: data[key] for key in TensorSummary.__dataclass_fields__}
        return cls(
            TensorSummary(**summary | {"shape": tuple(data["shape"])}),
            data["plan"],
            data["is_exact"],
            data["sparsity"],
            _histogram_from_json(data["weights"]),
            _histogram_from_json(data["errors"]),
        )


@dataclass(frozen=True)
class Variant:
    """One stored form of a model."""

    name: str
    tensors: Sequence[TensorReport]
    about: str = ""
    """One sentence about the method."""
    error: float | None = None
    """Relative RMS error over all weights, or None if unknown."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Other measurements: `perplexity`, `save_seconds`, `load_seconds`, ..."""

    @property
    def _untied(self) -> list[TensorReport]:
        return [x for x in self.tensors if x.stored.codec != "tied"]

    @property
    def items(self) -> int:
        """Total number of items; tied tensors count once."""
        return sum(x.stored.items for x in self._untied)

    @property
    def dense_bytes(self) -> int:
        """Total bytes in memory; tied tensors count once."""
        return sum(x.stored.dense_bytes for x in self._untied)

    @property
    def stored_bytes(self) -> int:
        """Total bytes in the files."""
        return sum(x.stored.stored_bytes for x in self.tensors)

    @property
    def is_exact(self) -> bool | None:
        """Whether all tensors are bitwise equal to the original, or None if unknown."""
        flags = {x.is_exact for x in self._untied}
        if False in flags:
            return False
        return None if None in flags else True

    def to_json(self) -> Json:
        """Return a JSON object."""
        return {
            "name": self.name,
            "about": self.about,
            "items": self.items,
            "dense_bytes": self.dense_bytes,
            "stored_bytes": self.stored_bytes,
            "is_exact": self.is_exact,
            "error": _finite_or_none(self.error),
            "measured": {k: x for k, x in self.measured.items() if math.isfinite(x)},
            "tensors": [x.to_json() for x in self.tensors],
        }

    @classmethod
    def from_json(cls, data: Json) -> "Variant":
        """Parse the output of `to_json`."""
        tensors = [TensorReport.from_json(x) for x in data["tensors"]]
        return cls(data["name"], tensors, data["about"], data["error"], data["measured"])


@dataclass(frozen=True)
class CheckpointReport:
    """One checkpoint of a run."""

    name: str
    step: int | None
    base: str | None
    """Name of the base checkpoint if this one is a delta."""
    profile: str
    bytes: int
    dense_bytes: int
    """Bytes of the state in memory."""
    created: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything that the page shows."""

    title: str
    created: str
    writer: str
    """Version of slimtensors."""
    variants: Sequence[Variant] = ()
    checkpoints: Sequence[CheckpointReport] = ()
    recipe: Json | None = None
    """The report of a recipe (`docs/schemas/recipe-report.json`)."""
    quantization: QuantizationSummary | None = None
    """Which linear layers of a quantized folder stay dense."""
    fit: Json | None = None
    """The report of a folder that was fitted to a budget (`docs/schemas/fit-report.json`)."""

    def to_json(self) -> Json:
        """Return a JSON object."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "created": self.created,
            "writer": self.writer,
            "variants": [variant.to_json() for variant in self.variants],
            "checkpoints": [
                asdict(point)
                | {"metrics": {k: _finite_or_none(x) for k, x in point.metrics.items()}}
                for point in self.checkpoints
            ],
            "recipe": self.recipe,
            "quantization": self.quantization and self.quantization.to_json(),
            "fit": self.fit,
        }

    @classmethod
    def from_json(cls, data: Json) -> "Report":
        """Parse the output of `to_json`; raise if it is malformed or too new."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CorruptFileError("not a slimtensors report")
        if not isinstance(data.get("version"), int) or data["version"] > VERSION:
            found = data.get("version")
            raise UnsupportedVersionError(
                f"unsupported report version {found}; upgrade slimtensors"
            )
        with report_malformed("incomplete report"):
            quantization, fit = data.get("quantization"), data.get("fit")  # not in version 0.1
            if fit is not None:
                _check_fit(fit)
            report = cls(
                data["title"],
                data["created"],
                data["writer"],
                [Variant.from_json(variant) for variant in data["variants"]],
                [CheckpointReport(**point) for point in data["checkpoints"]],
                data["recipe"],
                QuantizationSummary.from_json(quantization) if quantization else None,
                fit,
            )
            if not all(isinstance(x, str) for x in (report.title, report.created, report.writer)):
                raise CorruptFileError("title, created and writer must be text")
            json.dumps(report.to_json(), allow_nan=False)  # raises where the page would
            return report


def is_report(path: StrPath) -> bool:
    """Return True if the file was written by `write_report`."""
    if "://" in str(path) or not str(path).endswith(".json") or not Path(path).is_file():
        return False
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return f'"{FORMAT}"' in file.read(200)  # the first key


def write_report(report: Report, path: StrPath) -> None:
    """Write a report to a JSON file."""
    write_json(local_path(path), report.to_json())


def read_report(path: StrPath) -> Report:
    """Read a report from a JSON file."""
    raw = read_bytes(path)
    with report_malformed(str(path)):
        return Report.from_json(json.loads(raw))


def read_recipe(source: StrPath) -> Json | None:
    """Return the recipe report in a file or folder, or None if there is none."""
    if "://" in str(source):
        return None
    path = Path(source) / REPORT_FILE if Path(source).is_dir() else Path(source)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        # Measurements of a broken model may be NaN, which the page cannot show.
        data = json.loads(read_bytes(path), parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    if not isinstance(data, dict) or not data.keys() >= {"steps", "layers", "quality"}:
        return None  # a file of another program with the same name
    with report_malformed(f"{path}: incomplete recipe report"):
        _check_recipe(data)
    return data


def read_quantization_report(source: StrPath) -> QuantizationSummary | None:
    """Return which layers of a quantized folder stay dense, or None if it is not recorded."""
    return _read_folder_file(source, QUANTIZATION_REPORT, QuantizationSummary.from_json)


def read_fit_report(source: StrPath) -> Json | None:
    """Return the report of a folder that was fitted to a budget, or None if it was not."""

    def check(data: Json) -> Json:
        _check_fit(data)
        return data

    return _read_folder_file(source, FIT_REPORT, check)


def _read_folder_file(source: StrPath, name: str, parse: Callable[[Json], T]) -> T | None:
    """Parse a JSON file of a model folder; return None if there is none."""
    if not is_model_folder(source):
        return None
    folder = resolve_folder(locate(source))
    if name not in folder.files():
        return None
    file = folder.child(name)
    with report_malformed(str(file)):
        return parse(json.loads(file.read(), parse_constant=lambda _: None))


def _check_fit(data: Json) -> None:
    """Raise KeyError or TypeError if a value that is shown is missing or not a number."""
    _check_numbers(data, "parameters", "source_bytes", "weight_bytes", "bits_per_parameter")
    _check_numbers(data, "predicted_kl", optional=True)
    budget, measured, notes = data["budget"], data["measured"], data["notes"]
    if not isinstance(budget, dict) or not isinstance(notes, list):
        raise TypeError("expected a budget and a list of notes")
    if not all(isinstance(note, str) for note in notes):
        raise TypeError("notes must be text")
    for value in budget.values():
        if not isinstance(value, str):
            _check_numbers({"budget": value}, "budget")
    if measured is not None:
        keys = ("kl", "top1_agreement", "acceptance_rate", "perplexity_before", "perplexity")
        _check_numbers(measured, "predictions")
        _check_numbers(measured, *keys, optional=True)
    for point in data["curve"]:
        _check_numbers(point, "bytes", "predicted_kl")
    for tensor in data["tensors"]:
        _check_numbers(tensor, "weights", "bits")
        _check_numbers(tensor, "predicted_kl", optional=True)
        if not isinstance(tensor["name"], str) or not isinstance(tensor["note"], str):
            raise TypeError("name and note must be text")


def _check_numbers(data: Json, *keys: str, optional: bool = False) -> None:
    for key in keys:
        value = data[key]
        is_missing = value is None and optional
        if not is_missing and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"{key} must be a number, got {str(value)[:80]}")


def _check_recipe(data: Json) -> None:
    """Raise KeyError, TypeError or AttributeError if a value that the page shows is missing."""
    for state in data["layers"]:
        LayerState(**state)
    for step in data["steps"]:
        step["modifier"], step["notes"], step["seconds"]
        for layer in step["layers"]:
            LayerReport.from_json(layer)
    data["notes"], data["format"], data["stored_bytes"], data["sparsity"]


def _finite_or_none(x: float | None) -> float | None:
    """Return `x`, or None if it is NaN or infinite, which JSON cannot represent."""
    return x if x is not None and math.isfinite(x) else None


def _histogram_to_json(x: Histogram | None) -> Json | None:
    if x is None:
        return None
    return {"low": float(f"{x.low:.4g}"), "high": float(f"{x.high:.4g}"), "counts": list(x.counts)}


def _histogram_from_json(data: Any) -> Histogram | None:
    return None if data is None else Histogram(data["low"], data["high"], tuple(data["counts"]))
