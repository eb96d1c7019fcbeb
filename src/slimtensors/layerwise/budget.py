"""The budget of a model, and the report of a fit."""

import math
from dataclasses import dataclass

from slimtensors.archive.summary import format_bytes
from slimtensors.errors import ConfigError
from slimtensors.layerwise.divergence import Divergence
from slimtensors.storage import parse_size
from slimtensors.tensor import Json


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limit of the size or the divergence of a model: exactly one of these.

    Example:
        >>> Budget(size="60MB")
        Budget(size='60MB', bits=None, kl=None)
    """

    size: int | str | None = None
    """Bytes of all weight files, such as `"60MB"`."""
    bits: float | None = None
    """Bits per parameter, on average over the model."""
    kl: float | None = None
    """Divergence from the original predictions on held-out data, in nats per prediction."""

    def __post_init__(self) -> None:
        given = [x for x in (self.size, self.bits, self.kl) if x is not None]
        if len(given) != 1:
            raise ConfigError(f"a budget is one of size, bits and kl, got {len(given)} of them")
        number: object = given[0]
        if self.size is not None and isinstance(self.size, int | str):
            number = parse_size(self.size)
        is_number = isinstance(number, int | float) and not isinstance(number, bool)
        is_whole = self.size is None or isinstance(number, int)
        if not is_number or not is_whole or not 0 < number < math.inf:  # type: ignore[operator]
            raise ConfigError(f"a budget must be a positive number, got {given[0]!r}")

    def count_bytes(self, parameters: int) -> int | None:
        """Return the budget in bytes; None for a maximum divergence."""
        if self.size is not None:
            return parse_size(self.size)
        return None if self.bits is None else int(self.bits * parameters / 8)


@dataclass(frozen=True)
class FitReport:
    """Result of `fit`."""

    budget: Budget
    parameters: int
    source_bytes: int
    """Bytes of the dense weights."""
    weight_bytes: int
    """Bytes of all weight files."""
    tensors: tuple[tuple[str, int, float, float | None, str], ...]
    """Name, number of weights, bits per weight, predicted divergence and note of each tensor."""
    predicted: float
    """Divergence that the statistics predict."""
    divergence: Divergence | None
    """Divergence on held-out data."""
    curve: tuple[tuple[int, float], ...]
    """Bytes and predicted divergence at other sizes."""
    notes: tuple[str, ...] = ()
    folder_bytes: int | None = None
    """Bytes of the whole folder: also the tokenizer and configs. None if none was written."""

    @property
    def bits(self) -> float:
        """Bits per parameter."""
        return 8 * self.weight_bytes / self.parameters

    def to_json(self) -> Json:
        """Return the JSON form."""
        names = ("name", "weights", "bits", "predicted_kl", "note")
        budget = {"size": self.budget.size, "bits": self.budget.bits, "kl": self.budget.kl}
        return {
            "budget": {key: value for key, value in budget.items() if value is not None},
            "parameters": self.parameters,
            "source_bytes": self.source_bytes,
            "weight_bytes": self.weight_bytes,
            "bits_per_parameter": round(self.bits, 4),
            "predicted_kl": self.predicted,
            "measured": None if self.divergence is None else self.divergence.to_json(),
            "curve": [{"bytes": size, "predicted_kl": loss} for size, loss in self.curve],
            "tensors": [dict(zip(names, each, strict=True)) for each in self.tensors],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        sizes = f"{format_bytes(self.source_bytes)} -> {format_bytes(self.weight_bytes)}"
        lines = [f"{sizes}, {self.bits:.2f} bits per parameter"]
        if self.folder_bytes is not None:
            lines[0] += f"; {format_bytes(self.folder_bytes)} with tokenizer and configs"
        if self.divergence is not None:
            lines.append(str(self.divergence))
        return "\n".join([*lines, *self.notes])
