"""Group sizes that fit the layers of a model, for presets whose group size was not chosen."""

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from slimtensors.archive.summary import LayerGroupSize, describe_group_sizes
from slimtensors.quantization.affine import list_group_sizes
from slimtensors.quantization.config import QuantizationConfig, find_unused_name

_SMALLEST_KERNEL_GROUP = 32

_EXPERT = re.compile(r"(^|\.)experts?\.")


@dataclass(frozen=True)
class LayerColumns:
    """A layer of a model with the numbers of columns of its matrices."""

    name: str
    group: str | None
    """Group of the config that quantizes it."""
    columns: Sequence[int]

    @property
    def is_expert(self) -> bool:
        """Whether it is one expert of several, or a stack of them."""
        return _EXPERT.search(f"{self.name}.") is not None


@dataclass(frozen=True)
class FittedConfig:
    """A config whose group sizes fit all layers."""

    config: QuantizationConfig
    smaller: Sequence[LayerGroupSize] = ()
    """Layers with another group size than the preset."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Group that one was divided into -> its group in the original config."""

    def restrict_to(self, used: Collection[str]) -> QuantizationConfig:
        """Return the config without unused groups that were divided from a used one."""
        kept = {self.origins[group] for group in used if group in self.origins}
        groups = {
            name: scheme
            for name, scheme in self.config.config_groups.items()
            if name in used or self.origins.get(name) not in kept
        }
        return replace(self.config, config_groups=groups)

    @property
    def notes(self) -> list[str]:
        """A sentence for each group size that differs from the preset."""
        return describe_group_sizes(self.smaller)


def choose_group_size(columns: int, largest: int) -> int:
    """Return the largest group size that fits a number of columns; -1 for a scale per row.

    `largest`, halved as often as necessary, takes precedence, because kernels support only such
    sizes down to 32: those of vLLM do not run groups of 96.
    """
    size = largest
    while size >= _SMALLEST_KERNEL_GROUP:
        if columns % size == 0:
            return size
        size //= 2
    fitting = list_group_sizes(columns, largest)
    return fitting[0] if fitting and fitting[0] < columns else -1


def fit_group_sizes(config: QuantizationConfig, layers: Sequence[LayerColumns]) -> FittedConfig:
    """Return a config with a group for each group size, if the user did not choose the size.

    Layers with equal numbers of columns get equal group sizes, because vLLM merges some of them,
    such as queries, keys and values. All experts get one size, because loaders apply one scheme to
    all of them. `layers` are all layers of the model, quantized or not.
    """
    groups = dict(config.config_groups)
    smaller: list[LayerGroupSize] = []
    origins: dict[str, str] = {}
    for name, scheme in config.config_groups.items():
        members = [layer for layer in layers if layer.group == name and all(layer.columns)]
        if not scheme.fits_columns or not members:
            continue
        assert scheme.weights is not None
        assert scheme.weights.group_size is not None
        requested = scheme.weights.group_size
        sizes = _choose_sizes(members, requested)
        smaller += [
            LayerGroupSize(layer.name, min(layer.columns), sizes[layer.name], requested)
            for layer in members
            if sizes[layer.name] != requested
        ]
        distinct = sorted({*sizes.values()}, reverse=True)
        for size in distinct:
            fitted = scheme.with_group_size(size)
            if len(distinct) > 1:
                names = {layer.name for layer in members if sizes[layer.name] == size}
                fitted = fitted.with_targets(find_targets(names, [x.name for x in layers]))
            group = name if size == distinct[0] else find_unused_name(name, groups)
            groups[group] = fitted
            origins[group] = name
    if groups == config.config_groups:
        return FittedConfig(config)
    return FittedConfig(replace(config, config_groups=groups), smaller, origins)


def _choose_sizes(layers: Iterable[LayerColumns], requested: int) -> dict[str, int]:
    """Return the group size of each layer."""
    layers = list(layers)
    experts = math.gcd(*(n for layer in layers if layer.is_expert for n in layer.columns))
    return {
        layer.name: choose_group_size(
            experts if layer.is_expert else math.gcd(*layer.columns), requested
        )
        for layer in layers
    }


def find_targets(names: Iterable[str], all_names: Iterable[str]) -> list[str]:
    """Return few targets that match exactly these layers: patterns with any index, or names.

    A pattern starts at the list of blocks, such as `layers`, because classes of the same model
    have different prefixes before it: it then also matches in the base model.
    """
    names, others = set(names), set(all_names) - set(names)
    targets: list[str] = []
    for stem, alike in _group_by_pattern(names).items():
        targets += _find_pattern(stem, others) or sorted(alike)
    return sorted(targets)


def _group_by_pattern(names: Iterable[str]) -> Mapping[tuple[str, ...], list[str]]:
    """Return the names that differ in indexes only, by their parts with patterns for indexes."""
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(names):
        parts = tuple("[0-9]+" if x.isdecimal() else re.escape(x) for x in name.split("."))
        alike.setdefault(parts, []).append(name)
    return alike


def _find_pattern(parts: Sequence[str], others: Iterable[str]) -> list[str]:
    """Return the shortest pattern for names with these parts that matches no others."""
    if "[0-9]+" not in parts:
        return []
    others = list(others)
    for start in range(max(parts.index("[0-9]+") - 1, 0), -1, -1):
        pattern = r"(.*\.)?" + r"\.".join(parts[start:]) + "$"
        if not any(re.match(pattern, name) for name in others):
            return [f"re:{pattern}"]
    return []
