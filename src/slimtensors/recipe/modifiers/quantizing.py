"""Modifiers that quantize weights and activations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimtensors.errors import ConfigError
from slimtensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from slimtensors.recipe.modifiers import fields
from slimtensors.recipe.modifiers.fields import LINEAR, OUTPUT


@dataclass(frozen=True)
class Mapped:
    """A norm, and the layers that read it."""

    smooth_layer: str
    balance_layers: tuple[str, ...]

    @classmethod
    def of(cls, given: object) -> "Mapped":
        """Read either form in which others write it."""
        match given:
            case Mapped():
                return given
            case {"smooth_layer": str(norm), "balance_layers": layers, **rest} if not rest:
                return cls(norm, fields.names(layers))
            case [layers, str(norm)]:
                return cls(norm, fields.names(layers))
        raise ConfigError(
            f"a mapping is [[layers that read a norm], norm], or smooth_layer and balance_layers;"
            f" not {given!r}"
        )


@dataclass(frozen=True)
class _Quantizing:
    """What all of them say: which layers are quantized, and how."""

    scheme: str | None = None
    """A name like `W4A16`; or else, `config_groups`."""
    config_groups: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    targets: tuple[str, ...] = (LINEAR,)
    """Layers that `scheme` is for."""
    ignore: tuple[str, ...] = (OUTPUT,)
    kv_cache_scheme: QuantizationArgs | None = None

    def __post_init__(self) -> None:
        _put(self, "targets", fields.names(self.targets))
        _put(self, "ignore", fields.names(self.ignore))
        if isinstance(self.kv_cache_scheme, Mapping):
            _put(self, "kv_cache_scheme", QuantizationArgs.from_dict(self.kv_cache_scheme))
        if isinstance(self.scheme, Mapping):  # as others allow: targets by the name of a scheme
            _put(self, "config_groups", {**self.config_groups, **self.scheme})
            _put(self, "scheme", None)
        if (self.scheme is None) == (not self.config_groups):
            raise ConfigError("needs a scheme like W4A16, or config_groups, and not both")
        if self.scheme is not None:
            QuantizationScheme.preset(self.scheme)
        _put(self, "config_groups", QuantizationConfig({**self.config_groups}).config_groups)

    @property
    def config(self) -> QuantizationConfig:
        """What `config.json` would say."""
        groups = dict(self.config_groups)
        if self.scheme is not None:
            groups = {"group_0": QuantizationScheme.preset(self.scheme, self.targets)}
        return QuantizationConfig(
            groups, ignore=list(self.ignore), kv_cache_scheme=self.kv_cache_scheme
        )


@dataclass(frozen=True)
class Quantize(_Quantizing):
    """Round weights to nearest; data is needed only for static scales of activations."""


@dataclass(frozen=True)
class GPTQ(_Quantizing):
    """Round weights column by column, and let others make up for it (Frantar et al., 2022)."""

    dampening_frac: float = 0.01
    """Added to the diagonal of the Hessian, in units of its mean."""
    actorder: ActivationOrdering | None = None
    """`weight` or `group`: round the columns first into which most flows."""
    static_groups: bool = True
    """Whether the scales of all groups are found before the first column is rounded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.positive(self.dampening_frac, "dampening_frac")
        if self.actorder is not None:
            args = QuantizationArgs(4, group_size=128, actorder=self.actorder)
            _put(self, "actorder", args.actorder)

    @property
    def config(self) -> QuantizationConfig:
        """What `config.json` would say, with the order of columns."""
        config = super().config
        if self.actorder is None:
            return config
        ordered = {
            name: replace(group, weights=replace(group.weights, actorder=self.actorder))
            for name, group in config.config_groups.items()
            if group.weights is not None
        }
        return replace(config, config_groups=config.config_groups | ordered)


@dataclass(frozen=True)
class AWQ(_Quantizing):
    """Scale weights so that rounding to nearest does least harm, then round (Lin et al., 2023)."""

    steps: int = 20
    """How many scales are tried."""
    mappings: tuple[Mapped, ...] = ()
    """Norms to smooth, with who reads them; by default all that can be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _put(self, "mappings", _mappings(self.mappings))


@dataclass(frozen=True)
class SmoothQuant:
    """Share large inputs between inputs and weights, for the quantizing modifier that follows."""

    smoothing_strength: float = 0.5
    """0 leaves it all to the inputs, 1 to the weights (Xiao et al., 2022)."""
    mappings: tuple[Mapped, ...] = ()
    """Norms to smooth, with who reads them; by default all that can be."""
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _put(self, "mappings", _mappings(self.mappings))
        _put(self, "ignore", fields.names(self.ignore))
        if not 0 <= self.smoothing_strength <= 1:
            raise ConfigError(f"smoothing_strength is from 0 to 1, not {self.smoothing_strength!r}")


def _mappings(given: Sequence[object] | None) -> tuple[Mapped, ...]:
    return tuple(Mapped.of(each) for each in given or ())


def _put(modifier: object, field: str, value: Any) -> None:
    object.__setattr__(modifier, field, value)
