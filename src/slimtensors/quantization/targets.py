"""Resolve a config against a model: which layers it quantizes and how."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor, nn

from slimtensors.errors import ConfigError, StatusError, describe_problems
from slimtensors.quantization import formats
from slimtensors.quantization.affine import check_weight
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy, QuantizationType
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.group_sizes import FittedConfig, LayerColumns, fit_group_sizes
from slimtensors.quantization.layers import (
    has_float_input,
    has_stacked_experts,
    is_cached_attention_module,
    list_class_names,
    list_weights,
)
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.quantization.state import LayerPlan, Report, get_quantization

KV_CACHE = "kv_cache"
"""Name of the group of attention layers whose key/value cache is quantized."""

_ATTENTION_TARGETS = ("re:.*(self_attn|attention)$",)
"""Targets that compressed-tensors uses for the scheme of a key/value cache."""

_REGEX = "re:"
_STORED_DENSE = {None, "dense", "fakequant", formats.MIXED}


@dataclass(frozen=True)
class Layer:
    """A layer that a config quantizes, with its plan."""

    module: nn.Module
    plan: LayerPlan


def find_layers(
    model: nn.Module,
    config: QuantizationConfig,
    report: Report,
    allowed: Collection[nn.Module] | None = None,
) -> list[Layer]:
    """Return the layers that a config quantizes; surprises are added to the report.

    If `allowed` is given, only layers that are in it are returned.

    Raise `ConfigError` if there are none, if groups are ambiguous or if a layer cannot be
    quantized.
    """
    _check_status(model)
    fitted = fit_config(model, config)
    for note in fitted.notes:
        report.note(note)
    config = fitted.config
    layers = [*_plan_layers(model, config), *_plan_attentions(model, config)]
    _check_layers(model, config, layers, report)
    if allowed is not None:
        layers = [layer for layer in layers if layer.module in allowed]
    for layer in layers:
        report.groups.setdefault(layer.plan.group, []).append(layer.plan.name)
    return layers


def fit_config(model: nn.Module, config: QuantizationConfig) -> FittedConfig:
    """Return a config whose group sizes fit all layers of a model, if they were not chosen."""
    if not any(scheme.fits_columns for scheme in config.config_groups.values()):
        return FittedConfig(config)
    layers: list[LayerColumns] = []
    for name, module in model.named_modules():
        if not (weights := list_weights(module)):
            continue
        group = find_group(config.config_groups, config.ignore, name, list_class_names(module))
        matrices = [x.to_matrix(getattr(module, x.parameter).detach()) for x in weights]
        layers.append(LayerColumns(name, group, [x.shape[-1] if x.dim() else 0 for x in matrices]))
    return fit_group_sizes(config, layers)


def choose_format(scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    """Return the format of a group's weights: its own, the config's, or the inferred one."""
    if scheme.format not in _STORED_DENSE:
        return str(scheme.format)
    return formats.infer(scheme) if config.format in _STORED_DENSE else str(config.format)


def rank_target(target: str, name: str, classes: Sequence[str]) -> int | None:
    """Return the rank of a target's match: 0 by name, 1 by pattern, 2 by class; None if none.

    `classes` are the layer's class and base classes. Patterns match at the start of a name.
    """
    if target.startswith(_REGEX):
        return 1 if _compile_pattern(target).match(name) else None
    if target == name:
        return 0
    return 2 if target in classes else None


def matches_any(targets: Iterable[str], name: str, classes: Sequence[str]) -> bool:
    """Return True if any target matches the layer."""
    return any(rank_target(target, name, classes) is not None for target in targets)


def show_expert_group(
    groups: Mapping[str, QuantizationScheme], used: Collection[str], patterns: Iterable[str]
) -> dict[str, QuantizationScheme]:
    """Return the groups with names and targets by which transformers finds that of the experts.

    `used` is the group of the experts that it merges, if there are any, and `patterns` match them.
    """
    groups = dict(sorted(groups.items()))  # as config.json is written
    if len(used) != 1 or _find_expert_group(groups) in used:
        return groups
    (name,) = used
    scheme = groups.pop(name)
    scheme = scheme.with_targets(sorted({*scheme.targets, *patterns}))
    # The first name, because the targets of another group may contain shared experts.
    return {f"0_{name}": scheme, **groups}


def _find_expert_group(groups: Mapping[str, QuantizationScheme]) -> str:
    """Return the group whose scheme transformers applies to all experts that it merges."""
    patterns = {name: [t for t in x.targets if t.startswith("re:")] for name, x in groups.items()}
    by_name = (x for x, targets in patterns.items() if any("experts" in t for t in targets))
    by_class = (x for x, targets in patterns.items() if len(targets) < len(groups[x].targets))
    return next(by_name, None) or next(by_class, None) or next(iter(groups))


def find_group(
    groups: Mapping[str, QuantizationScheme],
    ignore: Iterable[str],
    name: str,
    classes: Sequence[str],
) -> str | None:
    """Return the group of a layer, or None if it is ignored or no group matches.

    A name takes precedence over a pattern, and a pattern over a class. Raise `ConfigError` if two
    groups match equally well.
    """
    if matches_any(ignore, name, classes):
        return None
    best: dict[int, list[str]] = {}
    for group, scheme in groups.items():
        ranks = [r for t in scheme.targets if (r := rank_target(t, name, classes)) is not None]
        if ranks:
            best.setdefault(min(ranks), []).append(group)
    if not best:
        return None
    found = best[min(best)]
    if len(found) > 1:
        raise ConfigError(
            f"{name}: the groups {' and '.join(sorted(found))} both match this layer;"
            " name it in one of them, or make their patterns disjoint"
        )
    return found[0]


def make_disjoint(
    groups: Mapping[str, QuantizationScheme],
    layers: Mapping[str, tuple[str, Sequence[str]]],
    patterns: Mapping[str, str] | None = None,
) -> dict[str, QuantizationScheme]:
    """Return the same groups, in alphabetical order, with targets that match no other group.

    `layers` maps the names of quantized layers in checkpoints to their group and classes. Loaders
    do not agree on which of two groups takes precedence, so the targets of groups that overlap, or
    that do not match a layer, are replaced by layer names, or by the `patterns` of those layers.
    """
    ambiguous: set[str] = set()
    explicit: dict[str, set[str]] = {}
    for name, (group, classes) in layers.items():
        explicit.setdefault(group, set()).add((patterns or {}).get(name, name))
        matching = {g for g, scheme in groups.items() if matches_any(scheme.targets, name, classes)}
        if matching != {group}:
            ambiguous |= matching | {group}
    return {
        group: scheme.with_targets(sorted(explicit[group])) if group in ambiguous else scheme
        for group, scheme in sorted(groups.items())
    }


@lru_cache(maxsize=4096)
def _compile_pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_REGEX))
    except re.error as error:
        raise ConfigError(
            f"target {target!r} is not a valid regular expression: {error}"
        ) from error


def _plan_layers(model: nn.Module, config: QuantizationConfig) -> Iterator[Layer]:
    """Yield the layers that groups of the config match."""
    for name, module in model.named_modules():
        if not (weights := list_weights(module)):
            continue
        group = find_group(config.config_groups, config.ignore, name, list_class_names(module))
        if group is None or (scheme := config.config_groups[group]).is_empty:
            continue
        quantized = weights if scheme.weights is not None else ()
        tensors = {w.parameter: getattr(module, w.parameter) for w in quantized}
        plan = LayerPlan(
            name,
            group,
            list_class_names(module),
            scheme,
            has_stacked_experts=has_stacked_experts(module),
            weights=quantized,
            weight_args=scheme.weights,
            dense={parameter: (x.shape, x.dtype) for parameter, x in tensors.items()},
            format=choose_format(scheme, config),
            activations=_get_activations(scheme),
        )
        yield Layer(module, plan)


def _get_activations(scheme: QuantizationScheme) -> dict[str, QuantizationArgs]:
    activations = {"input": scheme.input_activations, "output": scheme.output_activations}
    return {which: args for which, args in activations.items() if args is not None}


def _plan_attentions(model: nn.Module, config: QuantizationConfig) -> Iterator[Layer]:
    """Yield the attention layers that a group matches, or whose key/value cache is quantized."""
    cache = config.kv_cache_scheme
    for name, module in model.named_modules():
        if not is_cached_attention_module(module):
            continue
        classes = list_class_names(module)
        group = find_group(_select_narrow(model, config, name), config.ignore, name, classes)
        if group is not None and not config.config_groups[group].is_empty:
            scheme = config.config_groups[group]
            args = _get_attention_args(name, scheme)
            plan = LayerPlan(name, group, classes, scheme, activations=dict.fromkeys("qkv", args))
            yield Layer(module, plan)
        elif cache is not None:
            scheme = QuantizationScheme(_ATTENTION_TARGETS, input_activations=cache)
            activations = dict.fromkeys("kv", cache)
            yield Layer(module, LayerPlan(name, KV_CACHE, classes, scheme, activations=activations))


def _select_narrow(
    model: nn.Module, config: QuantizationConfig, name: str
) -> dict[str, QuantizationScheme]:
    """Return the groups with only those targets that match neither parent nor children of a layer.

    A pattern such as `re:.*self_attn.*` is meant for the layers inside of the attention layer.
    """
    parent = name.rpartition(".")[0]
    module = model.get_submodule(name)
    around = [(parent, list_class_names(model.get_submodule(parent)))]
    around += [(f"{name}.{x}", list_class_names(m)) for x, m in module.named_modules() if x]
    return {
        group: scheme.with_targets(
            [t for t in scheme.targets if all(rank_target(t, *other) is None for other in around)]
        )
        for group, scheme in config.config_groups.items()
    }


def _get_attention_args(name: str, scheme: QuantizationScheme) -> QuantizationArgs:
    args = scheme.input_activations
    if args is None or scheme.weights is not None or scheme.output_activations is not None:
        raise ConfigError(
            f"{name}: a group of attention layers has only input_activations, for queries, keys and"
            " values; to quantize weights, target q_proj, k_proj and v_proj"
        )
    return args


def _check_status(model: nn.Module) -> None:
    for module in model.modules():
        state = get_quantization(module)
        if state is not None and state.status is not QuantizationStatus.INITIALIZED:
            raise StatusError(
                f"{state.plan.name}: already {state.status}; apply the config to a new model"
            )


def _check_layers(
    model: nn.Module, config: QuantizationConfig, layers: list[Layer], report: Report
) -> None:
    matched = {layer.plan.group for layer in layers}
    groups = {name for name, scheme in config.config_groups.items() if not scheme.is_empty}
    if config.kv_cache_scheme is not None and not any("q" in x.plan.activations for x in layers):
        groups.add(KV_CACHE)
    for name in sorted(groups - matched):
        targets = config.config_groups[name].targets if name != KV_CACHE else "attention"
        raise ConfigError(f"{name}: no layer of the model matches {targets} and is not ignored")
    if not layers:
        report.note("the config quantizes nothing: all of its groups are empty")
    _check_targets(model, config, report)
    tied = _find_tied_names(model)
    problems: list[tuple[str, str]] = []
    for layer in layers:
        try:
            _check_layer(layer, tied, report)
        except ConfigError as error:
            problems.append((layer.plan.name, str(error)))
    if problems:
        raise ConfigError(describe_problems(problems))


def _check_layer(layer: Layer, tied: Mapping[int, list[str]], report: Report) -> None:
    module, plan = layer.module, layer.plan
    if "input" in plan.activations and not has_float_input(module):
        raise ConfigError("its input is token ids, not floats; remove it from this group")
    for weight in plan.weights:
        parameter: Tensor = getattr(module, weight.parameter)
        names = tied.get(id(parameter), [])
        if len(names) > 1:
            raise ConfigError(f"its weight is tied to {names}; ignore it or untie them")
        assert plan.weight_args is not None
        check_weight(weight.to_matrix(parameter.detach()), plan.weight_args)
    if plan.has_stacked_experts:
        _check_experts(plan, report)


def _check_experts(plan: LayerPlan, report: Report) -> None:
    if any(args.dynamic is not True for args in plan.activations.values()):
        raise ConfigError(
            "activations inside stacked experts cannot be calibrated; use dynamic=True, "
            "or a separate group that quantizes only their weights"
        )
    if plan.activations:
        report.note(
            f"{plan.name}: activations inside stacked experts are not quantized when this model"
            " runs, as in transformers"
        )
    if not can_transformers_load_experts(plan.weight_args, plan.format):
        report.note(
            f"{plan.name}: transformers cannot load stacked experts in {plan.format} with these"
            " arguments"
        )


PACKED_ZERO_POINTS = "zero points of asymmetric weights are packed"
"""Why transformers does not load weights for which `has_packed_zero_points` returns True."""


def can_transformers_load_experts(args: QuantizationArgs | None, format: str | None) -> bool:
    """Return True if transformers loads experts that are stored with these arguments."""
    if args is None or not args.symmetric:
        return args is None
    ungrouped = (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL)
    return format in ("pack-quantized", "mxfp4-pack-quantized", "mxfp6-pack-quantized") or (
        args.type is QuantizationType.FLOAT
        and format in ("float-quantized", "naive-quantized")
        and args.strategy in ungrouped
    )


def has_packed_zero_points(args: QuantizationArgs | None, format: str | None) -> bool:
    """Return True if weights have zero points in a shape that transformers does not load."""
    if args is None or args.symmetric or format != "pack-quantized":
        return False
    return args.strategy in (QuantizationStrategy.GROUP, QuantizationStrategy.CHANNEL)


def _check_targets(model: nn.Module, config: QuantizationConfig, report: Report) -> None:
    """Report targets and `ignore` entries that match no layer: they may be misspelled."""
    layers = [
        (name, list_class_names(m))
        for name, m in model.named_modules()
        if list_weights(m) or is_cached_attention_module(m)
    ]
    modules = [(name, list_class_names(m)) for name, m in model.named_modules()]
    for group, scheme in config.config_groups.items():
        for target in scheme.targets:
            if not any(rank_target(target, *layer) is not None for layer in layers):
                report.note(f"{group}: target {target!r} matches no layer that can be quantized")
    for target in config.ignore:
        if not any(rank_target(target, *layer) is not None for layer in modules):
            report.note(f"ignore: {target!r} matches nothing in this model")


def _find_tied_names(model: nn.Module) -> dict[int, list[str]]:
    """Return all names of each parameter, by its id."""
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return names
