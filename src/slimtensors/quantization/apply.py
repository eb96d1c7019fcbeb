"""Lifecycle of a quantized model: apply a config, calibrate, freeze, compress, decompress."""

import re

from torch import nn

from slimtensors.errors import ConfigError, StatusError
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.state import (
    Quantization,
    Report,
    attach_compressed_hooks,
    attach_hooks,
    get_quantization,
    remove_hooks,
)
from slimtensors.quantization.targets import Layer, find_layers


def apply_quantization_config(model: nn.Module, config: QuantizationConfig) -> Report:
    """Prepare the layers that a config matches, in place, up to its `quantization_status`.

    `initialized` only attaches the config. `calibration` also observes activations: run the model
    on data, then freeze it. `frozen` freezes at once, which is possible without static activations.

        config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        config.quantization_status = QuantizationStatus.FROZEN
        report = apply_quantization_config(model, config)

    Raise `ConfigError` if the config matches no layer or is ambiguous.
    """
    if config.transform_config:
        raise ConfigError("transform_config is not supported; remove it or apply it beforehand")
    if config.quantization_status not in _REACHABLE:
        raise StatusError(
            f"cannot apply a config with quantization_status {config.quantization_status}; "
            "use ModelCompressor.restore to load compressed weights"
        )
    freezes = config.quantization_status is QuantizationStatus.FROZEN
    if freezes and config.needs_data:
        raise StatusError("static activations need data: calibrate before freezing")
    report = Report()
    states = [_attach(layer, report) for layer in find_layers(model, config, report)]
    _link_experts(states)
    if config.quantization_status is not QuantizationStatus.INITIALIZED:
        for state in states:
            state.start_calibration()
    if freezes:
        model.apply(freeze_module_quantization)
    return report


_REACHABLE = (
    QuantizationStatus.INITIALIZED,
    QuantizationStatus.CALIBRATION,
    QuantizationStatus.FROZEN,
)


def freeze_module_quantization(module: nn.Module) -> None:
    """Fix the scales of a layer and round its weights.

        model.apply(freeze_module_quantization)

    Other modules are not changed. Raise `StatusError` if a layer with static activations has
    observed no data. An expert without data uses the range of the other experts, as reported.
    """
    state = get_quantization(module)
    if state is None or state.status is QuantizationStatus.FROZEN:
        return
    if state.status is QuantizationStatus.COMPRESSED:
        raise StatusError(f"{state.plan.name}: already compressed; decompress it first")
    state.freeze(module)


def compress_quantized_weights(module: nn.Module) -> None:
    """Replace the weights of a frozen layer by their stored form.

        model.apply(compress_quantized_weights)

    The layer can still be called: its weights are decompressed for the duration of each call.
    """
    state = get_quantization(module)
    if state is None or state.status is QuantizationStatus.COMPRESSED:
        return
    if state.status is not QuantizationStatus.FROZEN:
        raise StatusError(
            f"{state.plan.name}: status is {state.status}, expected frozen; "
            "call model.apply(freeze_module_quantization) first"
        )
    for weight in state.plan.weights:
        delattr(module, weight.parameter)
    state.set_status(QuantizationStatus.COMPRESSED)
    attach_compressed_hooks(module, state)


def decompress_quantized_weights(module: nn.Module) -> None:
    """Restore the dense weights of a layer after `compress_quantized_weights`."""
    state = get_quantization(module)
    if state is None or state.status is not QuantizationStatus.COMPRESSED:
        return
    remove_hooks(state.compressed_hooks)
    for weight in state.plan.weights:
        dense = nn.Parameter(state.dense_weight(weight), requires_grad=False)
        module.register_parameter(weight.parameter, dense)
    state.set_status(QuantizationStatus.FROZEN)


def _attach(layer: Layer, report: Report) -> Quantization:
    state = Quantization(layer.plan, report)
    attach_hooks(layer.module, state)
    return state


_EXPERT = re.compile(r"(experts?)\.\d+\.")


def _link_experts(states: list[Quantization]) -> None:
    """Set the siblings of each expert's layer: the same layer in the other experts."""
    families: dict[str, list[Quantization]] = {}
    for state in states:
        if _EXPERT.search(state.plan.name):
            families.setdefault(_EXPERT.sub(r"\1.*.", state.plan.name), []).append(state)
    for family in families.values():
        for state in family:
            state.siblings = tuple(other for other in family if other is not state)
