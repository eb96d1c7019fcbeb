"""How a whole model is quantized: the section `quantization_config` of `config.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from slimtensors.errors import ConfigError, nearest
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.tensor import Json

LAYOUT = "0.20.0"
"""The release of compressed-tensors whose layout of tensors and config we write."""

_SECTIONS = ("quantization_config", "compression_config")
_SAYS_HOW_TO_RUN = {"run_compressed", "dequantize", "use_optimized_inference"}


class QuantizationStatus(StrEnum):
    """How far a model, or a layer of it, has come."""

    INITIALIZED = "initialized"
    """It is known what to quantize."""
    CALIBRATION = "calibration"
    """What flows through is being watched."""
    FROZEN = "frozen"
    """Scales are fixed, and the model computes with quantized numbers."""
    COMPRESSED = "compressed"
    """Weights are in memory as they will be on disk."""
    DECOMPRESSED = "decompressed"
    """They were, and are dense again: frozen, as far as this library is concerned."""


@dataclass
class QuantizationConfig:
    """Which layers of a model are quantized, how, and how they are stored.

    A group may be a scheme, or a list of targets under the name of a preset. A key that is none of
    ours raises, with the nearest one.
    """

    config_groups: dict[str, QuantizationScheme] = field(default_factory=dict)
    format: str | None = None
    """How weights are stored; `mixed-precision` if groups differ. By default what suits them."""
    quantization_status: QuantizationStatus = QuantizationStatus.INITIALIZED
    ignore: list[str] = field(default_factory=list)
    """Targets that are left as they are, whatever the groups say."""
    kv_cache_scheme: QuantizationArgs | None = None
    global_compression_ratio: float | None = None
    quant_method: str = "compressed-tensors"
    version: str | None = LAYOUT
    """The release of compressed-tensors whose layout it is; none if an older file does not say."""
    sparsity_config: Json = field(default_factory=dict)
    transform_config: Json = field(default_factory=dict)
    moe_sparsity_config: Json | None = None

    def __post_init__(self) -> None:
        self.config_groups = {name: _group(name, x) for name, x in self.config_groups.items()}
        self.quantization_status = _status(self.quantization_status)
        self.ignore = list(self.ignore)

    @classmethod
    def preset(
        cls, name: str, *, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = ()
    ) -> Self:
        """Return a config of one group, by a name like `W4A16`."""
        scheme = QuantizationScheme.preset(name, targets)
        return cls({"group_0": scheme}, ignore=list(ignore))

    @classmethod
    def parse_file(cls, path: str | Path) -> Self:
        """Read a JSON file: the section alone, or a whole `config.json` of any generation."""
        try:
            data = json.loads(Path(path).read_text())
        except ValueError as error:
            raise ConfigError(f"{path}: is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise ConfigError(f"{path}: is not a JSON object")
        try:
            return cls.from_dict(data)
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from error

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the section, or a dict that holds it under any of the names it has had."""
        section = _unwrapped(data)
        known = {each.name for each in fields(cls)}
        for key in section.keys() - known - _SAYS_HOW_TO_RUN:
            raise ConfigError(f"quantization_config has no {key!r}; {nearest(key, known)}")
        given = {key: x for key, x in section.items() if key in known and x is not None}
        given.setdefault("version", None)
        if given.get("quant_method", "compressed-tensors") != "compressed-tensors":
            method = given["quant_method"]
            raise ConfigError(f"quant_method {method!r} is of another library, not of ours")
        if "kv_cache_scheme" in given:
            given["kv_cache_scheme"] = QuantizationArgs.from_dict(given["kv_cache_scheme"])
        return cls(**given)

    def to_dict(self) -> Json:
        """Return the section as compressed-tensors, transformers and vLLM read it."""
        groups = {name: group.to_dict() for name, group in sorted(self.config_groups.items())}
        data: Json = {
            "quant_method": self.quant_method,
            "version": self.version,
            "format": self.format,
            "quantization_status": str(self.quantization_status),
            "config_groups": groups,
            "ignore": list(self.ignore),
            "kv_cache_scheme": self.kv_cache_scheme and self.kv_cache_scheme.to_dict(),
            "global_compression_ratio": self.global_compression_ratio,
            "sparsity_config": self.sparsity_config,
            "transform_config": self.transform_config,
        }
        for key in ("format", "version"):
            if data[key] is None:
                del data[key]
        if self.moe_sparsity_config is not None:
            data["moe_sparsity_config"] = self.moe_sparsity_config
        return data

    @property
    def has_activations(self) -> bool:
        """Whether more than weights is quantized: what flows through layers, or what is cached."""
        schemes = self.config_groups.values()
        return self.kv_cache_scheme is not None or any(
            s.input_activations is not None or s.output_activations is not None for s in schemes
        )

    @property
    def needs_data(self) -> bool:
        """Whether the model must run over data before it can be frozen."""
        kv = self.kv_cache_scheme
        schemes = self.config_groups.values()
        return (kv is not None and not kv.dynamic) or any(s.needs_data for s in schemes)


def _unwrapped(data: Mapping[str, Any]) -> dict[str, Any]:
    """Find the section; what is sparse may stand in it, beside it, or alone."""
    for key in _SECTIONS:
        if isinstance(inner := data.get(key), Mapping):
            found = _unwrapped(inner)
            beside = data.get("sparsity_config") or found.get("sparsity_config")
            return {**found, "sparsity_config": beside}
    if data.keys() & {"config_groups", "quant_method", "kv_cache_scheme"}:
        return dict(data)
    if isinstance(zeros := data.get("sparsity_config"), Mapping):
        return {"sparsity_config": zeros}
    raise ConfigError(f"there is no quantization_config among the keys {sorted(data)[:9]}")


def _group(name: str, given: object) -> QuantizationScheme:
    match given:
        case QuantizationScheme():
            return given
        case Mapping():
            try:
                return QuantizationScheme.from_dict(given)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        case list() | tuple():
            return QuantizationScheme.preset(name, given)
    raise ConfigError(f"{name}: a group is a scheme, or a list of targets, not {given!r}")


def _status(given: object) -> QuantizationStatus:
    try:
        return QuantizationStatus(str(given))
    except ValueError:
        known = nearest(str(given), map(str, QuantizationStatus))
        raise ConfigError(f"quantization_status {given!r} does not exist; {known}") from None
