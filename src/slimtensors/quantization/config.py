"""Quantization of a whole model: the section `quantization_config` of `config.json`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from slimtensors.errors import ConfigError, report_malformed, suggest
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.storage import read_bytes
from slimtensors.tensor import Json

LAYOUT = "0.20.0"
"""Release of compressed-tensors whose layout of tensors and config we write."""

_SECTIONS = ("quantization_config", "compression_config")
_TYPES: Mapping[str, Any] = {
    "config_groups": Mapping,
    "format": str,
    "ignore": list | tuple,
    "global_compression_ratio": int | float,
    "version": str,
    "sparsity_config": Mapping,
    "transform_config": Mapping,
    "moe_sparsity_config": Mapping,
}
_RUNTIME_KEYS = {"run_compressed", "dequantize", "use_optimized_inference"}


class QuantizationStatus(StrEnum):
    """Stage of quantization of a model or layer."""

    INITIALIZED = "initialized"
    """A config is attached."""
    CALIBRATION = "calibration"
    """Activations are being observed."""
    FROZEN = "frozen"
    """Scales are fixed; the model computes with quantized values."""
    COMPRESSED = "compressed"
    """Weights are in memory in their stored form."""
    DECOMPRESSED = "decompressed"
    """Weights were compressed and are dense again; this library treats it as frozen."""


@dataclass
class QuantizationConfig:
    """Which layers of a model are quantized, how, and how they are stored.

        QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        QuantizationConfig.parse_file("config.json")
        QuantizationConfig({"W8A8": ["Linear"]})

    A group is a scheme, its JSON form, or a list of targets under the name of a preset.
    """

    config_groups: dict[str, QuantizationScheme] = field(default_factory=dict)
    format: str | None = None
    """Format of stored weights; `mixed-precision` if groups differ; by default inferred."""
    quantization_status: QuantizationStatus = QuantizationStatus.INITIALIZED
    ignore: list[str] = field(default_factory=list)
    """Targets that are not quantized, even if a group matches them."""
    kv_cache_scheme: QuantizationArgs | None = None
    global_compression_ratio: float | None = None
    quant_method: str = "compressed-tensors"
    version: str | None = LAYOUT
    """Release of compressed-tensors that defines the layout; None if an older file omits it."""
    sparsity_config: Json = field(default_factory=dict)
    transform_config: Json = field(default_factory=dict)
    moe_sparsity_config: Json | None = None

    def __post_init__(self) -> None:
        self.config_groups = {name: _parse_group(name, x) for name, x in self.config_groups.items()}
        self.quantization_status = _parse_status(self.quantization_status)
        self.ignore = list(self.ignore)

    @classmethod
    def preset(
        cls, name: str, *, targets: Sequence[str] = ("Linear",), ignore: Sequence[str] = ()
    ) -> Self:
        """Return a config with one group of a named scheme such as `W4A16`."""
        scheme = QuantizationScheme.preset(name, targets)
        return cls({"group_0": scheme}, ignore=list(ignore))

    @classmethod
    def parse_file(cls, path: str | Path) -> Self:
        """Read a JSON file: the section alone, or a `config.json` that contains it."""
        raw = read_bytes(path)
        with report_malformed(str(path), ConfigError):
            try:
                data = json.loads(raw)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"invalid JSON: {error}") from error
            if not isinstance(data, dict):
                raise ConfigError("expected a JSON object")
            return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the section, or a dict that contains it under a current or former key.

        Raise `ConfigError` on unknown keys, with the nearest valid one.
        """
        with report_malformed("quantization_config", ConfigError):
            return cls._parse(_find_section(data))

    @classmethod
    def _parse(cls, section: Mapping[str, Any]) -> Self:
        known = {entry.name for entry in fields(cls)}
        for key in section.keys() - known - _RUNTIME_KEYS:
            raise ConfigError(f"unknown key {key!r}; {suggest(key, known)}")
        values = {key: x for key, x in section.items() if key in known and x is not None}
        for key, value in values.items():
            if key in _TYPES and not isinstance(value, _TYPES[key]):
                raise ConfigError(f"{key}: unexpected {type(value).__name__} {str(value)[:80]!r}")
        if not all(isinstance(target, str) for target in values.get("ignore", ())):
            raise ConfigError("ignore: expected a list of names")
        values.setdefault("version", None)
        method = values.get("quant_method", "compressed-tensors")
        if method != "compressed-tensors":
            raise ConfigError(f"quant_method is {method!r}, expected 'compressed-tensors'")
        if "kv_cache_scheme" in values:
            values["kv_cache_scheme"] = QuantizationArgs.from_dict(values["kv_cache_scheme"])
        return cls(**values)

    def to_dict(self) -> Json:
        """Return the section that compressed-tensors, transformers and vLLM read."""
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
        """Whether activations or the key/value cache are quantized."""
        schemes = self.config_groups.values()
        return self.kv_cache_scheme is not None or any(
            s.input_activations is not None or s.output_activations is not None for s in schemes
        )

    @property
    def needs_data(self) -> bool:
        """Whether static scales of activations require calibration data."""
        kv = self.kv_cache_scheme
        schemes = self.config_groups.values()
        return (kv is not None and not kv.dynamic) or any(s.needs_data for s in schemes)


def _find_section(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section; `sparsity_config` may be inside it, beside it, or alone."""
    for key in _SECTIONS:
        if isinstance(inner := data.get(key), Mapping):
            section = _find_section(inner)
            sparsity = data.get("sparsity_config") or section.get("sparsity_config")
            return {**section, "sparsity_config": sparsity}
    if data.keys() & {"config_groups", "quant_method", "kv_cache_scheme"}:
        return dict(data)
    if isinstance(sparsity := data.get("sparsity_config"), Mapping):
        return {"sparsity_config": sparsity}
    raise ConfigError(f"quantization_config not found among the keys {sorted(data)[:9]}")


def _parse_group(name: str, group: object) -> QuantizationScheme:
    match group:
        case QuantizationScheme():
            return group
        case Mapping():
            try:
                return QuantizationScheme.from_dict(group)
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
        case list() | tuple():
            return QuantizationScheme.preset(name, group)
    raise ConfigError(f"{name}: expected a scheme or a list of targets, got {group!r}")


def _parse_status(status: object) -> QuantizationStatus:
    try:
        return QuantizationStatus(str(status))
    except ValueError:
        known = suggest(str(status), map(str, QuantizationStatus))
        raise ConfigError(f"unknown quantization_status {status!r}; {known}") from None
