"""What was done to each layer of a model."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from slimtensors.quantization.algorithms.rtn import Rounded
from slimtensors.spec import Json


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
