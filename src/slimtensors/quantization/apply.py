"""The life of a quantized model: apply a config, calibrate, freeze, compress; and back."""

import re

from torch import nn

from slimtensors.errors import ConfigError, StatusError
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.plans import Layer, find_layers
from slimtensors.quantization.state import (
    Quantization,
    Report,
    attach_compressed_hooks,
    attach_hooks,
    quantization_of,
    remove_hooks,
)


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
    freezes = config.quantization_status is QuantizationStatus.FROZEN
    if freezes and config.needs_data:
        raise StatusError("static activations need data: calibrate first, then freeze")
    report = Report()
    states = [_attached(layer, report) for layer in find_layers(model, config, report)]
    _introduce(states)
    if config.quantization_status is not QuantizationStatus.INITIALIZED:
        for state in states:
            state.watch()
    if freezes:
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
    for weight in state.plan.weights:
        delattr(module, weight.parameter)
    state.turn(QuantizationStatus.COMPRESSED)
    attach_compressed_hooks(module, state)


def decompress_quantized_weights(module: nn.Module) -> None:
    """Give a compressed layer its dense weights again; for `model.apply`."""
    state = quantization_of(module)
    if state is None or state.status is not QuantizationStatus.COMPRESSED:
        return
    remove_hooks(state.compressed_hooks)
    for weight in state.plan.weights:
        dense = nn.Parameter(state.dense_weight(weight), requires_grad=False)
        module.register_parameter(weight.parameter, dense)
    state.turn(QuantizationStatus.FROZEN)


def _attached(layer: Layer, report: Report) -> Quantization:
    state = Quantization(layer.plan, report)
    attach_hooks(layer.module, state)
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
