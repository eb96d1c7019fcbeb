"""Select the layers of a model folder that a config quantizes."""

import logging
import re
from collections.abc import Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from slimtensors.archive import Archive
from slimtensors.errors import ConfigError, MissingDependencyError
from slimtensors.folder.architecture import Architecture, Kind, Placement
from slimtensors.folder.experts import Tensors
from slimtensors.parallel import serially
from slimtensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationType,
    Quantized,
)
from slimtensors.quantization.codec import pack_quantized
from slimtensors.quantization.group_sizes import FittedConfig, LayerColumns, fit_group_sizes
from slimtensors.quantization.layers import (
    OUTPUT_LAYERS,
    find_layer_name,
    is_expert_stack,
    is_linear_name,
    is_router_name,
    list_class_names,
)
from slimtensors.quantization.targets import (
    PACKED_ZERO_POINTS,
    can_transformers_load_experts,
    choose_format,
    find_group,
    has_packed_zero_points,
    matches_any,
    show_expert_group,
)
from slimtensors.tensor import Json, Spec

_LOG = logging.getLogger(__name__)

LM_HEAD = "lm_head"
"""Entry of `ignore` that means the output layers, whatever their names are."""

EMPTY = "empty"
MISSING = "not in the files"
ROUTER = "router"
SHARED = "shares its weight with another layer"
STACKED = "stacked experts"

_MERGES_NOTHING = ("MergeModulelist",)
"""Conversion that returns no weight, and raises no error, if none can be dequantized."""
_SAMPLE_ROWS = 256
"""Rows to encode to find out whether a weight gets smaller; each row takes as much as another."""


@dataclass(frozen=True)
class FolderLayer:
    """A layer with a matrix, or with stacked matrices, of a model folder."""

    tensor: str
    """Name of its weight in the files; empty if they do not contain it."""
    spec: Spec
    """Dtype and shape of its weight."""
    names: tuple[str, ...]
    """Its name in the model, then that in the files if it is another one."""
    classes: tuple[str, ...] = ()
    """Names of classes that targets may use for it."""
    dense: str = ""
    """Why it cannot be quantized; empty if it can."""
    is_output: bool = False
    """Whether it predicts tokens."""
    stack: str = ""
    """The parameter that it is merged into, for one of several experts."""
    part_of: str = ""
    """The tensor that contains its weight, if that is split as it is written."""
    first_row: int = 0
    """The row at which the weight begins in `part_of`."""

    @property
    def name(self) -> str:
        """Its name in the model."""
        return self.names[0]

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer, or several of them, as opposed to another matrix."""
        if not self.tensor:
            return self.dense == SHARED
        return bool(self.classes) and self.dense != Kind.OTHER

    def matches(self, targets: Sequence[str]) -> bool:
        """Return True if any target matches the layer, under any of its names."""
        if self.is_output and LM_HEAD in targets:
            return True
        return any(matches_any(targets, name, self.classes) for name in self.names)

    def find_group(self, config: QuantizationConfig) -> str | None:
        """Return the group of the config that matches the layer, unless it is ignored."""
        if self.matches(config.ignore):
            return None
        groups = (find_group(config.config_groups, (), x, self.classes) for x in self.names)
        return next((group for group in groups if group is not None), None)


def build_architecture(archive: Archive, config: Json) -> Architecture | None:
    """Return the architecture of a folder; None, with a warning, if only names are known."""
    try:
        architecture = Architecture.build(config)
    except (ConfigError, MissingDependencyError) as error:
        reason = str(error)
    else:
        if _fits(archive, architecture):
            return architecture
        reason = f"most tensors do not belong to {type(architecture.model).__name__}"
    _LOG.warning("%s: layers are recognized by the names of tensors: %s", archive.path, reason)
    return None


def list_layers(
    archive: Tensors, architecture: Architecture | None, *, for_others: bool
) -> list[FolderLayer]:
    """Return the layers of a folder as its architecture shows them, or else by their names.

    A weight that others split on load is split already for them: its codes and scales would not be.
    """
    if architecture is None:
        return _mark_tied(archive, _list_by_name(archive))
    layers: list[FolderLayer] = []
    for name, place in architecture.place(archive).items():
        spec = archive.spec(name)
        pieces = _split(name, spec, place, architecture) if for_others else []
        layers += pieces or _find(name, spec, place, architecture, for_others=for_others)
    stored = {layer.name for layer in layers}
    for name, module in architecture.linear_layers.items():
        if name not in stored:
            weight = f"{name}.weight"
            spec = architecture.parameters[weight]
            dense = SHARED if weight in architecture.ties else MISSING if spec.numel else EMPTY
            is_output = name in architecture.output_layers
            classes = tuple(list_class_names(module))
            layers.append(FolderLayer("", spec, (name,), classes, dense, is_output))
    return _mark_tied(archive, layers)


def fit_layers(config: QuantizationConfig, layers: Iterable[FolderLayer]) -> FittedConfig:
    """Return a config whose group sizes fit all layers, if they were not chosen."""
    return fit_group_sizes(
        config,
        [
            LayerColumns(x.name, None if x.dense else x.find_group(config), x.spec.shape[-1:])
            for x in layers
        ],
    )


def _fits(archive: Tensors, architecture: Architecture) -> bool:
    """Return True if most tensors of a folder belong to the architecture."""
    known = 0
    for name, place in architecture.place(archive).items():
        if place.operations:
            known += 1
        elif place.kind is not Kind.UNKNOWN:
            known += architecture.parameters[place.parameter].shape == archive.spec(name).shape
    return 2 * known >= len(archive)


class StockLoader:
    """transformers with compressed-tensors, as it would load a quantized folder."""

    def __init__(
        self, archive: Tensors, config: QuantizationConfig, architecture: Architecture | None
    ) -> None:
        self._archive = archive
        self._config = config
        self._architecture = architecture
        self._parts: dict[tuple[Spec, str], dict[str, Spec]] = {}

    def find_larger(self, groups: Mapping[FolderLayer, str]) -> dict[FolderLayer, str]:
        """Return the layers that are at least as large quantized as dense."""
        return {
            layer: "would not get smaller"
            for layer, group in groups.items()
            if sum(part.nbytes for part in self._describe_parts(layer, group).values())
            >= self._sample(layer).nbytes
        }

    def find_unloadable(self, groups: Mapping[FolderLayer, str]) -> dict[FolderLayer, str]:
        """Return the layers that transformers does not load quantized, with the reason.

        If that is all of them, it does not load the model at all: then none, and a warning.
        """
        if self._architecture is None:
            return {}
        found = self._find_broken_experts(groups)
        while misplaced := self._find_misplaced(_without(groups, found), self._architecture):
            found |= misplaced
        broken = self._find_broken(_without(groups, found), self._architecture)
        if len(broken) < sum(not layer.stack for layer in _without(groups, found)):
            found |= {x: f"transformers cannot load it: {error}" for x, error in broken.items()}
        elif broken:
            self._warn(next(f"{layer.name}: {error}" for layer, error in broken.items()))
        return found

    def check_conversions(self, groups: Mapping[FolderLayer, str]) -> None:
        """Warn if weights cannot be loaded as they are stored, or converted on load.

        In a quantized folder it dequantizes what it merges, such as experts, which works for some
        formats only. Dense weights are accepted only next to FP8, and what it splits only if some
        of it is quantized. Raise if it would load random weights instead of stopping, or experts
        in several groups.
        """
        _check_experts({group for layer, group in groups.items() if layer.stack})
        if self._architecture is None:
            return
        stored = {layer.tensor: group for layer, group in groups.items()}
        merged: dict[str, set[str | None]] = {}
        operations: dict[str, tuple[str, ...]] = {}
        for name, place in self._architecture.place(self._archive).items():
            is_loaded = place.parameter in self._architecture.parameters
            if place.dequantizes and not place.others and is_loaded:
                merged.setdefault(place.parameter, set()).add(stored.get(name))
                operations[place.parameter] = place.operations
        problems = self._find_packed_zero_points(groups)
        problems |= self._architecture.find_failing_splits(layer.name for layer in groups)
        is_stopped = bool(problems)
        for name, used in merged.items():
            if what := self._find_unmergeable(used):
                advice = "quantize all of it with W4A16 or FP8_DYNAMIC"
                problems[name] = f"merged on load, which fails for {what}; {advice}"
                is_stopped |= operations[name] != _MERGES_NOTHING
        if not problems:
            return
        reason = next(f"{name}: {why}" for name, why in problems.items())
        if not is_stopped:
            raise ConfigError(
                f"transformers would load random weights for {reason}, or use the dialect slim"
            )
        self._warn(reason)

    def _find_packed_zero_points(self, groups: Mapping[FolderLayer, str]) -> dict[str, str]:
        packed = {
            name
            for name, scheme in self._config.config_groups.items()
            if has_packed_zero_points(scheme.weights, choose_format(scheme, self._config))
        }
        return {x.name: PACKED_ZERO_POINTS for x, group in groups.items() if group in packed}

    def _find_unmergeable(self, used: Collection[str | None]) -> str | None:
        """Return what of these groups cannot be merged on load; None if all can."""
        (group, *others) = used
        schemes = self._config.config_groups
        if others:
            return "dense beside quantized weights"
        if group is None:
            is_supported = all(map(_is_float8, schemes.values()))
            return None if is_supported else "dense weights in a quantized folder"
        format = choose_format(schemes[group], self._config)
        if can_transformers_load_experts(schemes[group].weights, format):
            return None
        return f"the format {format}"

    def _warn(self, reason: str) -> None:
        assert self._architecture is not None
        _LOG.warning("%s: %s", self._archive.path, self._architecture.describe_failure(reason))

    def _find_broken_experts(self, groups: Mapping[FolderLayer, str]) -> dict[FolderLayer, str]:
        """Return the experts to leave dense: they load only then, or else with wrong values."""
        schemes = self._config.config_groups
        formats = {name: choose_format(scheme, self._config) for name, scheme in schemes.items()}
        are_float8 = all(map(_is_float8, schemes.values()))
        broken = {
            group: f"transformers cannot load experts in {format}"
            for group, format in formats.items()
            # NVFP4 loads without its global scale, and without an error.
            if (are_float8 or format == "nvfp4-pack-quantized")
            and not can_transformers_load_experts(schemes[group].weights, format)
        }
        return {x: broken[group] for x, group in groups.items() if x.stack and group in broken}

    def _find_misplaced(
        self, groups: Mapping[FolderLayer, str], architecture: Architecture
    ) -> dict[FolderLayer, str]:
        """Return the layers whose stored tensors would not arrive in their module."""
        expected: dict[str, object] = dict(architecture.parameters)
        names = set(self._archive) - {layer.part_of for layer in groups}
        wanted: dict[str, tuple[FolderLayer, str]] = {}
        for layer, group in groups.items():
            if layer.stack:
                continue
            expected.pop(f"{layer.name}.weight")
            names.discard(layer.tensor)
            for suffix, spec in self._describe_parts(layer, group).items():
                # Never None, which transformers takes for a missing name.
                expected[f"{layer.name}.{suffix}"] = spec
                wanted[f"{layer.tensor.removesuffix('weight')}{suffix}"] = layer, suffix
        renamed = architecture.rename([*names, *wanted], expected)
        return {
            layer: f"{suffix} is lost on load"
            for name, (layer, suffix) in wanted.items()
            if renamed[name] != (f"{layer.name}.{suffix}", None)
        }

    def _find_broken(
        self, groups: Mapping[FolderLayer, str], architecture: Architecture
    ) -> dict[FolderLayer, str]:
        """Return the layers that transformers fails to load quantized, with the error."""
        layers = {layer.name: layer for layer in groups if not layer.stack}
        parts = {x: self._describe_parts(layer, groups[layer]) for x, layer in layers.items()}
        broken = architecture.find_unloadable(parts)
        return {layers[name]: error for name, error in broken.items()}

    def _sample(self, layer: FolderLayer) -> Spec:
        rows, *columns = layer.spec.shape
        return Spec(layer.spec.dtype, (min(rows, _SAMPLE_ROWS), *columns))

    def _describe_parts(self, layer: FolderLayer, group: str) -> dict[str, Spec]:
        """Return the tensors that store the first rows of a weight, by suffix."""
        key = self._sample(layer), group
        if key not in self._parts:
            scheme = self._config.config_groups[group]
            assert scheme.weights is not None
            is_packed = choose_format(scheme, self._config) == "pack-quantized"
            codec = Quantized(scheme.weights, packed=is_packed)
            sample = torch.zeros(key[0].shape, dtype=key[0].dtype)
            pieces = pack_quantized("weight", sample, codec, serially).pieces
            self._parts[key] = {piece.name: piece.spec for piece in pieces}
        return self._parts[key]


def name_experts(
    groups: Mapping[str, QuantizationScheme], used: Mapping[FolderLayer, str]
) -> dict[str, QuantizationScheme]:
    """Return the groups such that transformers finds that of the experts.

    `used` maps the quantized layers to their groups.
    """
    experts = {layer: group for layer, group in used.items() if layer.stack}
    patterns = {f"re:{replace_numbers(re.escape(x.name), r'[0-9]+')}$" for x in experts}
    return show_expert_group(groups, {*experts.values()}, patterns)


def replace_numbers(name: str, by: str) -> str:
    """Return the name of a layer with all of its indexes replaced."""
    return re.sub(r"(?<![^.])\d+(?![^.\\])", by, name)


def _check_experts(groups: Collection[str]) -> None:
    """Raise if experts that are merged on load are in several groups."""
    if len(groups) > 1:
        raise ConfigError(
            f"experts are in the groups {' and '.join(sorted(groups))}, but transformers and vLLM"
            " apply one scheme to all of them; target them in one group"
        )


def _is_float8(scheme: QuantizationScheme) -> bool:
    args = scheme.weights
    return args is not None and args.type is QuantizationType.FLOAT and args.num_bits == 8


def _without(
    groups: Mapping[FolderLayer, str], removed: Container[FolderLayer]
) -> dict[FolderLayer, str]:
    return {layer: group for layer, group in groups.items() if layer not in removed}


def _split(
    name: str, spec: Spec, place: Placement, architecture: Architecture
) -> list[FolderLayer]:
    """Return the linear layers that a weight is split into on load; empty if not split that way."""
    weights = [place.parameter, *place.others]
    names = [weight.removesuffix(".weight") for weight in weights]
    if not place.splits_rows or not all(x in architecture.linear_layers for x in names):
        return []
    in_file = name.rpartition(".")[0]
    layers = []
    row = 0
    for weight, module in zip(weights, names, strict=True):
        shape = architecture.parameters[weight].shape
        layers.append(
            FolderLayer(
                weight,
                Spec(spec.dtype, shape),
                (module, in_file),
                tuple(list_class_names(architecture.linear_layers[module])),
                part_of=name,
                first_row=row,
            )
        )
        row += shape[0]
    return layers if (row, *layers[0].spec.shape[1:]) == spec.shape else []


def _find(
    name: str, spec: Spec, place: Placement, architecture: Architecture, *, for_others: bool
) -> list[FolderLayer]:
    """Return the layer of a tensor; empty if its weight is not a matrix or a stack of them."""
    in_file = name.rpartition(".")[0]
    if place.kind is Kind.EXPERTS and not (place.operations and find_layer_name(name, spec)):
        stack = place.parameter
        return [FolderLayer(name, spec, (place.module,), ("Linear",), STACKED, stack=stack)]
    if find_layer_name(name, spec) is None or place.kind is Kind.EMBEDDING:
        return []
    if place.kind is Kind.EXPERTS:
        dense = "" if place.dequantizes or not for_others else _explain(place)
        stack = place.parameter
        return [FolderLayer(name, spec, (in_file,), ("Linear",), dense, stack=stack)]
    module = place.module if place.kind is not Kind.UNKNOWN else in_file
    names = (module,) if module == in_file else (module, in_file)
    linear = architecture.linear_layers.get(module)
    dense = "" if linear is not None and place.kind is Kind.LINEAR else _explain(place)
    if linear is not None and place.kind is Kind.CONVERTED and not for_others:
        dense = ""
    if place.parameter in architecture.ties or place.parameter in architecture.ties.values():
        dense = SHARED
    elif any(map(is_router_name, names)):
        dense = ROUTER
    return [
        FolderLayer(
            name,
            spec,
            names,
            ("Linear",) if linear is None else tuple(list_class_names(linear)),
            dense,
            is_output=module in architecture.output_layers or in_file.endswith(f".{LM_HEAD}"),
        )
    ]


def _explain(place: Placement) -> str:
    how = f" ({', '.join(place.operations)})" if place.operations else ""
    return f"{place.kind}{how}"


def _list_by_name(archive: Tensors) -> Iterator[FolderLayer]:
    for name in archive:
        spec = archive.spec(name)
        layer = find_layer_name(name, spec)
        if layer is not None:
            classes = ("Linear",) if is_linear_name(layer) else ()
            is_output = matches_any([OUTPUT_LAYERS], layer, ())
            yield FolderLayer(name, spec, (layer,), classes, is_output=is_output)
        elif is_expert_stack(name, spec) or (name.endswith(".weight") and len(spec.shape) > 2):
            classes = ("Linear",) if is_expert_stack(name, spec) else ()
            yield FolderLayer(name, spec, (name.rpartition(".")[0],), classes, STACKED)


def _mark_tied(archive: Tensors, layers: Iterable[FolderLayer]) -> list[FolderLayer]:
    """Return the layers; those that share their weight in the files cannot be quantized."""
    tied = archive.tied()
    shared = {*tied, *tied.values()}
    return [
        replace(layer, dense=SHARED) if (layer.part_of or layer.tensor) in shared else layer
        for layer in layers
    ]
