"""Resolve a config against a model: the layers it quantizes and how."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from torch import Tensor, nn

from slimtensors.errors import ConfigError, StatusError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import check_weight
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.layers import (
    are_experts,
    classes_of,
    is_cached_attention,
    takes_numbers,
    weights_of,
)
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.quantization.state import LayerPlan, Report, quantization_of

_REGEX = "re:"


def target_rank(target: str, name: str, classes: Sequence[str]) -> int | None:
    """Tell how closely a target fits a layer: 0 by name, 1 by pattern, 2 by class, or not.

    `classes` are the layer's class and its parents; a pattern need only fit the start of a name.
    """
    if target.startswith(_REGEX):
        return 1 if _pattern(target).match(name) else None
    if target == name:
        return 0
    return 2 if target in classes else None


def is_target(targets: Iterable[str], name: str, classes: Sequence[str]) -> bool:
    """Tell whether any target fits the layer."""
    return any(target_rank(target, name, classes) is not None for target in targets)


def resolve_target(
    groups: Mapping[str, QuantizationScheme],
    ignore: Iterable[str],
    name: str,
    classes: Sequence[str],
) -> str | None:
    """Return the group of a layer, or none.

    What is ignored has no group. Otherwise a name beats a pattern, and a pattern beats a class; two
    groups that fit equally well raise.
    """
    if is_target(ignore, name, classes):
        return None
    best: dict[int, list[str]] = {}
    for group, scheme in groups.items():
        ranks = [r for t in scheme.targets if (r := target_rank(t, name, classes)) is not None]
        if ranks:
            best.setdefault(min(ranks), []).append(group)
    if not best:
        return None
    found = best[min(best)]
    if len(found) > 1:
        raise ConfigError(
            f"{name}: the groups {' and '.join(sorted(found))} both claim this layer;"
            " name it in one of them, or make their patterns disjoint"
        )
    return found[0]


def make_disjoint(
    groups: Mapping[str, QuantizationScheme],
    layers: Mapping[str, tuple[str, Sequence[str]]],
    patterns: Mapping[str, str] | None = None,
) -> dict[str, QuantizationScheme]:
    """Return the same groups, in alphabetical order, with targets that no other group claims.

    `layers` are the quantized ones as checkpoints name them, each with its group and its classes.
    Loaders do not agree on which of two groups wins, so groups that overlap, or that do not fit a
    name, are written out: layer by layer, or with the pattern that some of these have.
    """
    unclear: set[str] = set()
    named: dict[str, set[str]] = {}
    for name, (group, classes) in layers.items():
        named.setdefault(group, set()).add((patterns or {}).get(name, name))
        claims = {g for g, scheme in groups.items() if is_target(scheme.targets, name, classes)}
        if claims != {group}:
            unclear |= claims | {group}
    return {
        group: scheme.with_targets(sorted(named[group])) if group in unclear else scheme
        for group, scheme in sorted(groups.items())
    }


@lru_cache(maxsize=4096)
def _pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_REGEX))
    except re.error as error:
        raise ConfigError(f"target {target!r} is not a regular expression: {error}") from error


KV_CACHE = "kv_cache"
"""What the group of layers is called that put keys and values into a cache."""

_STORED_DENSE = {None, "dense", "fakequant", formats.MIXED}


@dataclass(frozen=True)
class Layer:
    """A layer that a config quantizes, and how."""

    module: nn.Module
    plan: LayerPlan


def find_layers(model: nn.Module, config: QuantizationConfig, report: Report) -> list[Layer]:
    """Return what the config quantizes; raise if that is nothing, is not clear or is not possible.

    What the caller may not expect goes into the report.
    """
    _check_status(model)
    found = [*_layers(model, config), *_attentions(model, config)]
    _check(model, config, found, report)
    for layer in found:
        report.groups.setdefault(layer.plan.group, []).append(layer.plan.name)
    return found


def _layers(model: nn.Module, config: QuantizationConfig) -> Iterator[Layer]:
    """Yield the layers that groups of the config claim."""
    for name, module in model.named_modules():
        if not (weights := weights_of(module)):
            continue
        group = resolve_target(config.config_groups, config.ignore, name, classes_of(module))
        if group is None or (scheme := config.config_groups[group]).is_empty:
            continue
        quantized = weights if scheme.weights is not None else ()
        own = {w.parameter: getattr(module, w.parameter) for w in quantized}
        plan = LayerPlan(
            name,
            group,
            classes_of(module),
            are_experts=are_experts(module),
            weights=quantized,
            weight_args=scheme.weights,
            dense={parameter: (x.shape, x.dtype) for parameter, x in own.items()},
            format=format_of(scheme, config),
            activations=_activations(scheme),
        )
        yield Layer(module, plan)


def format_of(scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    """Return how the weights of a group are stored: as it says, as the config says, or as usual."""
    if scheme.format not in _STORED_DENSE:
        return str(scheme.format)
    return formats.infer(scheme) if config.format in _STORED_DENSE else str(config.format)


def _activations(scheme: QuantizationScheme) -> dict[str, QuantizationArgs]:
    both = {"input": scheme.input_activations, "output": scheme.output_activations}
    return {which: args for which, args in both.items() if args is not None}


def _attentions(model: nn.Module, config: QuantizationConfig) -> Iterator[Layer]:
    """Yield the layers that put keys and values into a cache, if these are to be quantized."""
    if (args := config.kv_cache_scheme) is not None:
        for name, module in model.named_modules():
            if is_cached_attention(module):
                plan = LayerPlan(
                    name, KV_CACHE, classes_of(module), activations={"k": args, "v": args}
                )
                yield Layer(module, plan)


def _check_status(model: nn.Module) -> None:
    for module in model.modules():
        state = quantization_of(module)
        if state is not None and state.status is not QuantizationStatus.INITIALIZED:
            raise StatusError(f"{state.plan.name}: is {state.status} already; take a fresh model")


def _check(
    model: nn.Module, config: QuantizationConfig, found: list[Layer], report: Report
) -> None:
    groups = {layer.plan.group for layer in found}
    wanted = {name for name, scheme in config.config_groups.items() if not scheme.is_empty}
    if config.kv_cache_scheme is not None:
        wanted.add(KV_CACHE)
    for name in sorted(wanted - groups):
        targets = config.config_groups[name].targets if name != KV_CACHE else "attention"
        raise ConfigError(f"{name}: no layer of the model fits {targets} and is not ignored")
    if not found:
        raise ConfigError("the config quantizes nothing of this model")
    _check_targets(model, config, report)
    tied = _tied(model)
    for layer in found:
        try:
            _check_layer(layer, tied, report)
        except ConfigError as error:
            raise ConfigError(f"{layer.plan.name}: {error}") from error


def _check_layer(layer: Layer, tied: Mapping[int, list[str]], report: Report) -> None:
    module, plan = layer.module, layer.plan
    if "input" in plan.activations and not takes_numbers(module):
        raise ConfigError("takes ids of tokens, not numbers; leave it out of this group")
    for weight in plan.weights:
        own: Tensor = getattr(module, weight.parameter)
        names = tied.get(id(own), [])
        if len(names) > 1:
            raise ConfigError(f"shares its weight with {names}; ignore it, or untie them")
        assert plan.weight_args is not None
        check_weight(weight.matrix(own.detach()), plan.weight_args)
    if plan.are_experts:
        _check_experts(plan, report)


def _check_experts(plan: LayerPlan, report: Report) -> None:
    if any(args.dynamic is not True for args in plan.activations.values()):
        raise ConfigError(
            "what flows between stacked experts cannot be watched; quantize it dynamically, "
            "or give these layers a group of their own for weights alone"
        )
    if plan.activations:
        report.note(
            f"{plan.name}: activations inside of stacked experts stay as they are while the model"
            " runs here, as in transformers; vLLM quantizes them"
        )
    if not _is_known_to_transformers(plan):
        report.note(
            f"{plan.name}: transformers cannot load stacked experts from {plan.format} as it is"
            " asked for here; vLLM can"
        )


def _is_known_to_transformers(plan: LayerPlan) -> bool:
    args = plan.weight_args
    if args is None or not args.symmetric:
        return args is None
    whole = (QuantizationStrategy.TENSOR, QuantizationStrategy.CHANNEL)
    return plan.format == "pack-quantized" or (
        plan.format in ("float-quantized", "naive-quantized") and args.strategy in whole
    )


def _check_targets(model: nn.Module, config: QuantizationConfig, report: Report) -> None:
    """Write down targets, also ignored ones, that fit no layer: they may be typing errors."""
    layers = [(name, classes_of(m)) for name, m in model.named_modules() if weights_of(m)]
    everything = [(name, classes_of(m)) for name, m in model.named_modules()]
    for group, scheme in config.config_groups.items():
        for target in scheme.targets:
            if not any(target_rank(target, *layer) is not None for layer in layers):
                report.note(f"{group}: target {target!r} fits no layer that can be quantized")
    for target in config.ignore:
        if not any(target_rank(target, *layer) is not None for layer in everything):
            report.note(f"ignore: {target!r} fits nothing in this model")


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return names
