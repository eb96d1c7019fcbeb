"""What is quantized in a set of layers, and how: weights, and what flows in and out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from slimtensors.errors import ConfigError, nearest
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.presets import PRESETS
from slimtensors.spec import Json

_ARGS = ("weights", "input_activations", "output_activations")
_OF_ACTIVATIONS = {
    QuantizationStrategy.TENSOR,
    QuantizationStrategy.TOKEN,
    QuantizationStrategy.GROUP,
    QuantizationStrategy.TENSOR_GROUP,
    QuantizationStrategy.ATTN_HEAD,
}


@dataclass(frozen=True)
class QuantizationScheme:
    """How the layers that `targets` name are quantized; what is none stays as it is."""

    targets: Sequence[str]
    """Class names, names of modules, or regular expressions of names: `re:.*mlp.*`."""
    weights: QuantizationArgs | None = None
    input_activations: QuantizationArgs | None = None
    output_activations: QuantizationArgs | None = None
    format: str | None = None
    """How the weights are stored; by default what suits them."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str) or not all(isinstance(t, str) for t in self.targets):
            raise ConfigError(f"targets must be a list of names, got {self.targets!r}")
        object.__setattr__(self, "targets", tuple(self.targets))
        if self.format == "mixed-precision":
            raise ConfigError("a group has one format; mixed-precision is of a whole config")
        for key in ("input_activations", "output_activations"):
            self._check_activations(key, getattr(self, key))
        if self.weights is not None and self.weights.dynamic:
            raise ConfigError("weights do not change while the model runs: dynamic=False")

    @property
    def is_empty(self) -> bool:
        """Whether it quantizes nothing."""
        return all(getattr(self, key) is None for key in _ARGS)

    @property
    def needs_data(self) -> bool:
        """Whether a scale can only be found by running the model."""
        activations = (self.input_activations, self.output_activations)
        return any(args is not None and args.dynamic is not True for args in activations)

    @classmethod
    def preset(cls, name: str, targets: Sequence[str] = ("Linear",)) -> Self:
        """Return the scheme that a name like `W4A16` stands for."""
        known = name.upper()
        if known not in PRESETS:
            raise ConfigError(f"there is no preset {name!r}; {nearest(known, PRESETS)}")
        weights, inputs = PRESETS[known]
        return cls(targets, weights=weights, input_activations=inputs)

    def to_dict(self) -> Json:
        """Return the JSON form: every key, null where there is nothing."""
        data: Json = {"targets": list(self.targets)}
        for key in _ARGS:
            args = getattr(self, key)
            data[key] = None if args is None else args.to_dict()
        return data | {"format": self.format}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the JSON form; a key that is unknown raises with the nearest one that exists."""
        known = {each.name for each in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"a group of quantized layers has no {key!r}; {nearest(key, known)}")
        if not isinstance(data.get("targets"), list):
            raise ConfigError(f"a group of quantized layers needs a list of targets: {data}")
        parsed = {key: QuantizationArgs.from_dict(data[key]) for key in _ARGS if data.get(key)}
        return cls(data["targets"], **parsed, format=data.get("format"))

    def with_targets(self, targets: Sequence[str]) -> Self:
        """Return the same scheme for other layers."""
        return replace(self, targets=targets)

    def _check_activations(self, key: str, args: QuantizationArgs | None) -> None:
        if args is None:
            return
        if args.strategy not in _OF_ACTIVATIONS:
            raise ConfigError(f"{key} cannot be quantized by {args.strategy}")
        if args.actorder is not None:
            raise ConfigError(f"{key}: actorder is an order of a weight's columns")
        if args.strategy is QuantizationStrategy.GROUP and not args.dynamic:
            raise ConfigError(f"{key}: scales per group are found while the model runs")
