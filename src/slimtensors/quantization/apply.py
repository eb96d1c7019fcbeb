"""The life of a quantized model: apply a config, calibrate, freeze, compress; and back."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from slimtensors.errors import ConfigError, StatusError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import check_weight
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.hooks import attach, attach_compressed, remove
from slimtensors.quantization.layers import (
    are_experts,
    classes_of,
    is_cached_attention,
    takes_numbers,
    weights_of,
)
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.quantization.state import Plan, Quantization, Report, quantization_of
from slimtensors.quantization.targets import rank, resolve

KV_CACHE = "kv_cache"

_STORED_DENSE = {None, "dense", "fakequant", formats.MIXED}


def apply_quantization_config(model: nn.Module, config: QuantizationConfig) -> Report:
    """Prepare the layers that a config names, in place, up to the status it asks for.

    `initialized` only attaches the config, `calibration` also watches what flows through, `frozen`
    goes on to `freeze_module_quantization`, which needs no data if nothing static is asked for. A
    config that matches no layer raises, as does one that is not clear about a layer.
    """
    if config.transform_config:
        raise ConfigError("transform_config is not supported: remove it, or apply it beforehand")
    if config.quantization_status not in _REACHABLE:
        raise StatusError(
            f"a model cannot be made {config.quantization_status} by a config; "
            "ModelCompressor.restore loads compressed weights into it"
        )
    report = Report()
    found = [*_layers(model, config), *_attentions(model, config)]
    _check(model, config, found, report)
    states = [_attached(layer, report) for layer in found]
    _introduce(states)
    for layer in found:
        report.groups.setdefault(layer.plan.group, []).append(layer.plan.name)
    if config.quantization_status is not QuantizationStatus.INITIALIZED:
        for state in states:
            state.watch()
    if config.quantization_status is QuantizationStatus.FROZEN:
        if config.needs_data:
            raise StatusError("static activations need data: calibrate first, then freeze")
        model.apply(freeze_module_quantization)
    return report


_REACHABLE = (
    QuantizationStatus.INITIALIZED,
    QuantizationStatus.CALIBRATION,
    QuantizationStatus.FROZEN,
)


def freeze_module_quantization(module: nn.Module) -> None:
    """Fix the scales of a layer and round its weights; for `model.apply`.

    What is not quantized is left alone. A layer with static activations that saw no data raises; an
    expert that saw none takes the range of those beside it, which the report says.
    """
    state = quantization_of(module)
    if state is None or state.status is QuantizationStatus.FROZEN:
        return
    if state.status is QuantizationStatus.COMPRESSED:
        raise StatusError(f"{state.plan.name}: is compressed already; decompress it first")
    state.freeze(module)


def compress_quantized_weights(module: nn.Module) -> None:
    """Replace the weights of a frozen layer by what will be on disk; for `model.apply`.

    The layer still computes, from dense weights that exist only for as long as it does.
    """
    state = quantization_of(module)
    if state is None or state.status is QuantizationStatus.COMPRESSED:
        return
    if state.status is not QuantizationStatus.FROZEN:
        raise StatusError(
            f"{state.plan.name}: is {state.status}, not frozen; "
            "model.apply(freeze_module_quantization) comes before compressing"
        )
    if not state.plan.weights:
        return
    for weight in state.plan.weights:
        delattr(module, weight.parameter)
    state.turn(QuantizationStatus.COMPRESSED)
    attach_compressed(module, state)


def decompress_quantized_weights(module: nn.Module) -> None:
    """Give a compressed layer its dense weights again; for `model.apply`."""
    state = quantization_of(module)
    if state is None or state.status is not QuantizationStatus.COMPRESSED:
        return
    remove(state.compressed_hooks)
    for weight in state.plan.weights:
        dense = nn.Parameter(state.dense_weight(weight), requires_grad=False)
        module.register_parameter(weight.parameter, dense)
    state.turn(QuantizationStatus.FROZEN)


@dataclass(frozen=True)
class _Layer:
    module: nn.Module
    plan: Plan


def _layers(model: nn.Module, config: QuantizationConfig) -> Iterator[_Layer]:
    """Yield the layers that groups of the config claim."""
    for name, module in model.named_modules():
        if not (weights := weights_of(module)):
            continue
        group = resolve(config.config_groups, config.ignore, name, classes_of(module))
        if group is None or (scheme := config.config_groups[group]).is_empty:
            continue
        quantized = weights if scheme.weights is not None else ()
        own = {w.parameter: getattr(module, w.parameter) for w in quantized}
        plan = Plan(
            name,
            group,
            quantized,
            scheme.weights,
            {parameter: (x.shape, x.dtype) for parameter, x in own.items()},
            format_of(scheme, config),
            _activations(scheme),
        )
        yield _Layer(module, plan)


def format_of(scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    """Return how the weights of a group are stored: as it says, as the config says, or as usual."""
    if scheme.format not in _STORED_DENSE:
        return str(scheme.format)
    return formats.infer(scheme) if config.format in _STORED_DENSE else str(config.format)


def _activations(scheme: QuantizationScheme) -> dict[str, QuantizationArgs]:
    both = {"input": scheme.input_activations, "output": scheme.output_activations}
    return {which: args for which, args in both.items() if args is not None}


def _attentions(model: nn.Module, config: QuantizationConfig) -> Iterator[_Layer]:
    """Yield the layers that put keys and values into a cache, if these are to be quantized."""
    if (args := config.kv_cache_scheme) is not None:
        for name, module in model.named_modules():
            if is_cached_attention(module):
                yield _Layer(module, Plan(name, KV_CACHE, activations={"k": args, "v": args}))


def _check(
    model: nn.Module, config: QuantizationConfig, found: list[_Layer], report: Report
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


def _check_layer(layer: _Layer, tied: Mapping[int, list[str]], report: Report) -> None:
    module, plan = layer.module, layer.plan
    state = quantization_of(module)
    if state is not None and state.status is not QuantizationStatus.INITIALIZED:
        raise StatusError(f"{plan.name}: is {state.status} already")
    if "input" in plan.activations and not takes_numbers(module):
        raise ConfigError("takes ids of tokens, not numbers; leave it out of this group")
    for weight in plan.weights:
        own: Tensor = getattr(module, weight.parameter)
        names = tied.get(id(own), [])
        if len(names) > 1:
            raise ConfigError(f"shares its weight with {names}; ignore it, or untie them")
        assert plan.weight_args is not None
        check_weight(weight.matrix(own.detach()), plan.weight_args)
    if are_experts(module) and plan.activations:
        _check_experts(plan, report)


def _check_experts(plan: Plan, report: Report) -> None:
    if any(args.dynamic is not True for args in plan.activations.values()):
        raise ConfigError(
            "what flows between stacked experts cannot be watched; quantize it dynamically, "
            "or give these layers a group of their own for weights alone"
        )
    report.note(
        f"{plan.name}: activations inside of stacked experts stay as they are while the model runs"
        " here; loaders like vLLM quantize them"
    )


def _check_targets(model: nn.Module, config: QuantizationConfig, report: Report) -> None:
    """Write down targets, also ignored ones, that fit no layer: they may be typing errors."""
    layers = [(name, classes_of(m)) for name, m in model.named_modules() if weights_of(m)]
    everything = [(name, classes_of(m)) for name, m in model.named_modules()]
    for group, scheme in config.config_groups.items():
        for target in scheme.targets:
            if not any(rank(target, *layer) is not None for layer in layers):
                report.note(f"{group}: target {target!r} fits no layer that can be quantized")
    for target in config.ignore:
        if not any(rank(target, *layer) is not None for layer in everything):
            report.note(f"ignore: {target!r} fits nothing in this model")


def _tied(model: nn.Module) -> dict[int, list[str]]:
    """Return the names of each parameter, by its identity."""
    names: dict[int, list[str]] = {}
    for name, x in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(x), []).append(name)
    return names


def _attached(layer: _Layer, report: Report) -> Quantization:
    state = Quantization(layer.plan, report)
    attach(layer.module, state)
    return state


_EXPERT = re.compile(r"(experts?)\.\d+\.")


def _introduce(states: list[Quantization]) -> None:
    """Tell each expert's layer of the same layer in the experts beside it."""
    alike: dict[str, list[Quantization]] = {}
    for state in states:
        if _EXPERT.search(state.plan.name):
            alike.setdefault(_EXPERT.sub(r"\1.*.", state.plan.name), []).append(state)
    for family in alike.values():
        for state in family:
            state.siblings = tuple(other for other in family if other is not state)
