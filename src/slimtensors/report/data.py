"""What a report says, as plain data: `docs/schemas/report.json` describes its JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any

from slimtensors.errors import CorruptFileError, UnsupportedVersionError
from slimtensors.report.histogram import Histogram
from slimtensors.spec import Json
from slimtensors.summary import Stored

FORMAT, VERSION = "slimtensors report", 1


@dataclass(frozen=True)
class TensorReport:
    """One tensor: how it is stored, and what is in it."""

    stored: Stored
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
        own = {key: data[key] for key in Stored.__dataclass_fields__}
        return cls(
            Stored(**own | {"shape": tuple(data["shape"])}),
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
