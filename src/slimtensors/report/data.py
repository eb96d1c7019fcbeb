"""Report data: plain dataclasses and their JSON (`docs/schemas/report.json`)."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimtensors.archive.summary import TensorSummary
from slimtensors.errors import CorruptFileError, FormatError, UnsupportedVersionError
from slimtensors.layerwise.report import LayerReport
from slimtensors.recipe.report import FILE, LayerState
from slimtensors.storage import StrPath, local_path, write_json
from slimtensors.tensor import Json

_SAMPLE = 1 << 16
"""Items that are looked at; more would not change the picture."""
_WIDTH = 4.0
"""Standard deviations that are shown on either side; what lies outside counts in the last bins."""

_REAL = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_SMALL = {torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz}
_WHOLE = {torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool}


@dataclass(frozen=True)
class Histogram:
    """How many of the sampled items lie in each of the bins, all as wide."""

    low: float
    high: float
    counts: tuple[int, ...]


def sample(x: Tensor) -> Tensor | None:
    """Return some items of `x`, always the same places, as float64; none if they are no numbers."""
    if x.is_quantized:
        x = x.dequantize()
    if x.dtype not in _REAL | _SMALL | _WHOLE or not x.numel():
        return None
    flat = x.reshape(-1)
    if len(flat) > _SAMPLE:
        random = torch.Generator().manual_seed(0)
        at = torch.randint(len(flat), (_SAMPLE,), generator=random)
        # Small floats cannot be indexed; their bytes can.
        flat = flat.view(torch.uint8)[at].view(x.dtype) if x.dtype in _SMALL else flat[at]
    return flat.double()


def histogram(values: Tensor | None, bins: int) -> Histogram | None:
    """Count values that are finite and not zero; none if there are too few to make a picture."""
    if values is None:
        return None
    kept = values[torch.isfinite(values) & (values != 0)].numpy()
    if len(kept) < 2:
        return None
    middle, spread = float(kept.mean()), float(kept.std())
    low = max(float(kept.min()), middle - _WIDTH * spread)
    high = min(float(kept.max()), middle + _WIDTH * spread)
    if not np.isfinite(high - low) or not high - low > abs(middle) * 1e-12:
        return None
    counts, _ = np.histogram(kept.clip(low, high), bins, (low, high))
    return Histogram(low, high, tuple(counts.tolist()))


FORMAT, VERSION = "slimtensors report", 1


@dataclass(frozen=True)
class TensorReport:
    """One tensor: how it is stored, and what is in it."""

    stored: TensorSummary
    plan: Json | None
    """The tree of codecs; none if it is stored plain."""
    is_exact: bool | None
    """Whether it is what was given, bit for bit; none if nobody can tell."""
    sparsity: float
    """The share of zeros."""
    weights: Histogram | None = None
    """Of its items, without zeros."""
    errors: Histogram | None = None
    """Of the differences from the original, without zeros."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        own = asdict(self.stored)
        return {
            **own,
            "shape": list(self.stored.shape),
            "file": PurePath(self.stored.file).name,
            "error": _finite(self.stored.error),
            "bound": None if self.stored.bound is None else round(self.stored.bound, 4),
            "plan": self.plan,
            "is_exact": self.is_exact,
            "sparsity": round(self.sparsity, 6),
            "weights": _histogram_json(self.weights),
            "errors": _histogram_json(self.errors),
        }

    @classmethod
    def from_json(cls, data: Json) -> "TensorReport":
        """Read the JSON form."""
        own = {key: data[key] for key in TensorSummary.__dataclass_fields__}
        return cls(
            TensorSummary(**own | {"shape": tuple(data["shape"])}),
            data["plan"],
            data["is_exact"],
            data["sparsity"],
            _histogram(data["weights"]),
            _histogram(data["errors"]),
        )


@dataclass(frozen=True)
class Variant:
    """A model as it is stored in one way."""

    name: str
    tensors: Sequence[TensorReport]
    about: str = ""
    """A sentence on what was done."""
    error: float | None = None
    """How far all weights together are from the original, relative RMS; none if not known."""
    measured: Mapping[str, float] = field(default_factory=dict)
    """Whatever was measured: `perplexity`, `save_seconds`, `load_seconds`, …."""

    @property
    def _own(self) -> list[TensorReport]:
        return [x for x in self.tensors if x.stored.codec != "tied"]

    @property
    def items(self) -> int:
        """Number of items of all tensors; tied ones count once."""
        return sum(x.stored.items for x in self._own)

    @property
    def dense_bytes(self) -> int:
        """Bytes of all tensors in memory; tied ones count once."""
        return sum(x.stored.dense_bytes for x in self._own)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all tensors in the files."""
        return sum(x.stored.stored_bytes for x in self.tensors)

    @property
    def is_exact(self) -> bool | None:
        """Whether all of it is what was given; none if nobody can tell."""
        found = {x.is_exact for x in self._own}
        return False if False in found else None if None in found else True

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {
            "name": self.name,
            "about": self.about,
            "items": self.items,
            "dense_bytes": self.dense_bytes,
            "stored_bytes": self.stored_bytes,
            "is_exact": self.is_exact,
            "error": _finite(self.error),
            "measured": {k: x for k, x in self.measured.items() if math.isfinite(x)},
            "tensors": [x.to_json() for x in self.tensors],
        }

    @classmethod
    def from_json(cls, data: Json) -> "Variant":
        """Read the JSON form."""
        tensors = [TensorReport.from_json(x) for x in data["tensors"]]
        return cls(data["name"], tensors, data["about"], data["error"], data["measured"])


@dataclass(frozen=True)
class Link:
    """A checkpoint of a run."""

    name: str
    step: int | None
    base: str | None
    """The checkpoint that it is a difference from."""
    profile: str
    bytes: int
    dense_bytes: int
    """Of its state in memory."""
    created: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    title: str
    created: str
    writer: str
    """The version of this library."""
    variants: Sequence[Variant] = ()
    checkpoints: Sequence[Link] = ()
    recipe: Json | None = None
    """What was done to it, as `docs/schemas/recipe-report.json` describes."""

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "title": self.title,
            "created": self.created,
            "writer": self.writer,
            "variants": [variant.to_json() for variant in self.variants],
            "checkpoints": [
                asdict(link) | {"metrics": {k: _finite(x) for k, x in link.metrics.items()}}
                for link in self.checkpoints
            ],
            "recipe": self.recipe,
        }

    @classmethod
    def from_json(cls, data: Json) -> "Report":
        """Read the JSON form; raise if it is none."""
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise CorruptFileError("is no report of slimtensors")
        if not isinstance(data.get("version"), int) or data["version"] > VERSION:
            raise UnsupportedVersionError(f"has version {data.get('version')}; update slimtensors")
        try:
            return cls(
                data["title"],
                data["created"],
                data["writer"],
                [Variant.from_json(variant) for variant in data["variants"]],
                [Link(**link) for link in data["checkpoints"]],
                data["recipe"],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptFileError(f"is no whole report: {error}") from error


def _finite(x: float | None) -> float | None:
    """Return what JSON can say: it has no NaN."""
    return x if x is not None and math.isfinite(x) else None


def _histogram_json(x: Histogram | None) -> Json | None:
    if x is None:
        return None
    return {"low": float(f"{x.low:.4g}"), "high": float(f"{x.high:.4g}"), "counts": list(x.counts)}


def _histogram(data: Any) -> Histogram | None:
    return None if data is None else Histogram(data["low"], data["high"], tuple(data["counts"]))


_START = 200
"""Characters in which the format is named."""


def is_report(path: StrPath) -> bool:
    """Tell whether this is a file that `write_report` has written."""
    if "://" in str(path) or not str(path).endswith(".json") or not Path(path).is_file():
        return False
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return f'"{FORMAT}"' in file.read(_START)


def write_report(report: Report, path: StrPath) -> None:
    """Write the JSON file."""
    write_json(local_path(path), report.to_json())


def read_report(path: StrPath) -> Report:
    """Read the JSON file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFileError(f"{path}: is not JSON: {error}") from error
    try:
        return Report.from_json(data)
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from error


def read_recipe(source: StrPath) -> Json | None:
    """Return what the file says, or the one in this folder; none if there is no such file."""
    if "://" in str(source):
        return None
    path = Path(source) / FILE if Path(source).is_dir() else Path(source)
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        # Measured on a broken model, figures may be NaN, which no page can hold.
        data = json.loads(path.read_text(encoding="utf-8"), parse_constant=lambda _: None)
    except ValueError:
        return None
    if not isinstance(data, dict) or not data.keys() >= {"steps", "layers", "quality"}:
        return None  # of somebody else, who also likes the name
    try:
        _check(data)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptFileError(f"{path}: is no whole report of a recipe: {error}") from error
    return data


def _check(data: Json) -> None:
    """Raise if something is missing that the page shows."""
    for state in data["layers"]:
        LayerState(**state)
    for step in data["steps"]:
        step["modifier"], step["notes"], step["seconds"]
        for layer in step["layers"]:
            LayerReport.from_json(layer)
    data["notes"], data["format"], data["stored_bytes"], data["sparsity"]
