"""Quantization of a whole model: the section `quantization_config` of `config.json`."""

import itertools
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from slimtensors.errors import ConfigError, report_malformed, suggest
from slimtensors.quantization.args import PydanticMethods, QuantizationArgs, to_text
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.storage import read_bytes
from slimtensors.tensor import Json

if TYPE_CHECKING:
    from torch import nn

LAYOUT = "0.20.0"
"""Release of compressed-tensors whose layout of tensors and config we write."""

DEFAULT_QUANTIZATION_METHOD = "compressed-tensors"
DEFAULT_QUANTIZATION_FORMAT = "fakequant"
"""Format of a config that does not name one: inferred when the model is stored."""

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
    """Stage of quantization of a model or layer; a later stage is greater."""

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

    def __lt__(self, other: str | None) -> bool:
        return other is not None and _rank(self) < _rank(other)

    def __le__(self, other: str | None) -> bool:
        return other is not None and _rank(self) <= _rank(other)

    def __gt__(self, other: str | None) -> bool:
        return not self <= other

    def __ge__(self, other: str | None) -> bool:
        return not self < other


LIFECYCLE_ORDER = list(QuantizationStatus)
"""Stages from first to last."""


def _rank(status: str) -> int:
    return LIFECYCLE_ORDER.index(QuantizationStatus(status))


@dataclass
class QuantizationConfig(PydanticMethods):
    """Which layers of a model are quantized, how, and how they are stored.

        QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        QuantizationConfig.parse_file("config.json")
        QuantizationConfig({"W8A8": ["Linear"]})

    A group is a scheme, its JSON form, or a list of targets under the name of a preset.
    """

    config_groups: dict[str, QuantizationScheme] = field(default_factory=dict)
    format: str = DEFAULT_QUANTIZATION_FORMAT
    """Format of stored weights; `mixed-precision` if groups differ; by default inferred."""
    quantization_status: QuantizationStatus = QuantizationStatus.INITIALIZED
    ignore: list[str] = field(default_factory=list)
    """Targets that are not quantized, even if a group matches them."""
    kv_cache_scheme: QuantizationArgs | None = None
    global_compression_ratio: float | None = None
    quant_method: str = DEFAULT_QUANTIZATION_METHOD
    version: str | None = LAYOUT
    """Release of compressed-tensors that defines the layout; None if an older file omits it."""
    sparsity_config: Json = field(default_factory=dict)
    transform_config: Json = field(default_factory=dict)
    moe_sparsity_config: Json | None = None

    def __post_init__(self) -> None:
        self.config_groups = {name: _parse_group(name, x) for name, x in self.config_groups.items()}
        self.quantization_status = _parse_status(self.quantization_status)
        self.format = to_text(self.format or DEFAULT_QUANTIZATION_FORMAT)
        if isinstance(self.ignore, str):
            raise ConfigError(f"ignore must be a list of names, got {self.ignore!r}")
        self.ignore = list(self.ignore or ())
        if self.kv_cache_scheme is not None:
            self.kv_cache_scheme = QuantizationArgs.from_dict(self.kv_cache_scheme)

    @classmethod
    def preset(
        cls,
        name: str,
        *,
        targets: Sequence[str] = ("Linear",),
        ignore: Sequence[str] = (),
        group_size: int | None = None,
    ) -> Self:
        """Return a config with one group of a named scheme such as `W4A16`.

        `group_size` replaces the group size of the scheme; -1 is one scale per channel.
        """
        scheme = QuantizationScheme.preset(name, targets, group_size=group_size)
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
    def model_validate(cls, data: Any) -> Self:
        """Parse the section, as `from_dict` does."""
        return data if isinstance(data, cls) else cls.from_dict(data)

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
        return cls(**values)

    @classmethod
    def from_pretrained(
        cls, model: "nn.Module", format: str | list[str] | None = None
    ) -> Self | None:
        """Return the config of a quantized model, or None if no layer is quantized.

        Layers that are not quantized are listed in `ignore` if others of their class are.
        """
        from slimtensors.quantization.state_dict import read_schemes  # imports this module

        found = read_schemes(model)
        if not found.schemes and found.kv_cache is None:
            return None
        if format is None:
            compressed = found.status is QuantizationStatus.COMPRESSED
            format = "int-quantized" if compressed else "dense"
        elif isinstance(format, list):
            format = format[0] if len(format) == 1 else "mixed-precision"
        return cls(
            {f"group_{i}": scheme for i, scheme in enumerate(found.schemes)},
            format,
            found.status,
            found.unquantized,
            found.kv_cache,
        )

    def to_dict(self) -> Json:
        """Return the section that compressed-tensors, transformers and vLLM read."""
        groups = {name: group.to_dict() for name, group in sorted(self.config_groups.items())}
        version = {} if self.version is None else {"version": self.version}
        return {
            **self.model_dump(),
            "config_groups": groups,
            **version,
            "sparsity_config": self.sparsity_config,
            "transform_config": self.transform_config,
        }

    def model_dump(self, *, mode: str = "python", exclude: Collection[str] = ()) -> Json:
        """Return the fields that a config of compressed-tensors has; in either mode."""
        data: Json = {
            "config_groups": {name: group.to_dict() for name, group in self.config_groups.items()},
            "quant_method": self.quant_method,
            "kv_cache_scheme": self.kv_cache_scheme and self.kv_cache_scheme.model_dump(),
            "format": self.format,
            "quantization_status": str(self.quantization_status),
            "global_compression_ratio": self.global_compression_ratio,
            "ignore": list(self.ignore),
            "moe_sparsity_config": self.moe_sparsity_config,
        }
        return {key: value for key, value in data.items() if key not in exclude}

    def merge(self, config: "QuantizationConfig") -> None:
        """Append the groups of another config, in place.

        Names in `ignore` that the other config targets are removed, patterns are kept. The status
        is the later of both; the format is `mixed-precision` if the formats of groups differ.
        """
        targets = [t for scheme in config.config_groups.values() for t in scheme.targets]
        self.ignore = [
            name
            for name in self.ignore
            if name.startswith("re:") or not any(_matches_name(target, name) for target in targets)
        ]
        for name, scheme in config.config_groups.items():
            self.config_groups[find_unused_name(name, self.config_groups)] = scheme
        distinct = {scheme.format for scheme in self.config_groups.values()}
        only = next(iter(distinct)) if len(distinct) == 1 else "mixed-precision"
        self.format = only or DEFAULT_QUANTIZATION_FORMAT
        self.quantization_status = max(self.quantization_status, config.quantization_status)

    def requires_calibration_data(self) -> bool:
        """Return True if llm-compressor needs data: as `needs_data`, but also for any cache."""
        weights = [scheme.weights for scheme in self.config_groups.values()]
        by_importance = any(args is not None and args.observer == "imatrix_mse" for args in weights)
        return self.kv_cache_scheme is not None or by_importance or self.needs_data

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


def _matches_name(target: str, name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target.removeprefix("re:"), name) is not None
    return target == name


def find_unused_name(name: str, used: Collection[str]) -> str:
    """Return the name; if it is used, with the next unused number at its end."""
    if name not in used:
        return name
    base, _, number = name.rpartition("_")
    if not base or not number.isdigit():
        base, number = name, "0"
    candidates = (f"{base}_{i}" for i in itertools.count(int(number) + 1))
    return next(candidate for candidate in candidates if candidate not in used)


def _parse_status(status: object) -> QuantizationStatus:
    try:
        return QuantizationStatus(to_text(status))
    except ValueError:
        known = suggest(str(status), map(str, QuantizationStatus))
        raise ConfigError(f"unknown quantization_status {status!r}; {known}") from None
