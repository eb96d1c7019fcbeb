"""Lifecycle of a quantized model: apply a config, calibrate, freeze, compress, decompress."""

import re
from collections.abc import Callable, Collection, Mapping

from torch import nn

from slimtensors.errors import ConfigError, StatusError
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.hooks import (
    attach_compressed_hooks,
    attach_hooks,
    quantize_queries,
    remove_hooks,
)
from slimtensors.quantization.state import Quantization, Report, get_quantization
from slimtensors.quantization.targets import Layer, find_layers


def apply_quantization_config(
    model: nn.Module,
    config: QuantizationConfig | None,
    run_compressed: bool = False,
    show_progress: bool = True,
    allowed_modules: Collection[nn.Module] | None = None,
) -> Report:
    """Prepare the layers that a config matches, in place, up to its `quantization_status`.

    `initialized` only attaches the config. `calibration` also observes activations: run the model
    on data, then freeze it. `frozen` freezes at once; static scales of activations are then to be
    loaded from a checkpoint. Without a config, nothing is done.

        config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        config.quantization_status = QuantizationStatus.FROZEN
        report = apply_quantization_config(model, config)

    `allowed_modules` restricts the layers to these modules; groups are checked for the whole
    model. `show_progress` is accepted for scripts of compressed-tensors; there is no progress bar.

    Raise `ConfigError` if a group of the config matches no layer or is ambiguous.
    """
    report = Report()
    if config is None:
        return report
    if run_compressed:
        raise ConfigError("run_compressed is not supported; use ModelCompressor.restore instead")
    if config.transform_config:
        raise ConfigError("transform_config is not supported; remove it or apply it beforehand")
    if config.quantization_status not in _REACHABLE:
        raise StatusError(
            f"cannot apply a config with quantization_status {config.quantization_status}; "
            "use ModelCompressor.restore to load compressed weights"
        )
    layers = find_layers(model, config, report, allowed_modules)
    states = [_attach(layer, report) for layer in layers]
    _link_experts(states)
    if any("q" in state.plan.activations for state in states):
        quantize_queries(model)
    if config.quantization_status >= QuantizationStatus.CALIBRATION:
        for layer, state in zip(layers, states, strict=True):
            state.start_calibration(layer.module)
    if config.quantization_status == QuantizationStatus.FROZEN:
        for layer, state in zip(layers, states, strict=True):
            state.freeze(layer.module, requires_data=False)
        if config.needs_data:
            report.note("static scales of activations are not set; load them from a checkpoint")
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
    state.set_status(module, QuantizationStatus.COMPRESSED)
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
    state.set_status(module, QuantizationStatus.FROZEN)


def set_module_for_calibration(module: nn.Module) -> None:
    """Start to observe the activations of a layer to which a config is attached."""
    state = get_quantization(module)
    if state is not None and state.status is QuantizationStatus.INITIALIZED:
        state.start_calibration(module)


def apply_quantization_status(model: nn.Module, status: QuantizationStatus) -> None:
    """Move the quantized layers that are behind a status forward to it, stage by stage."""
    target = QuantizationStatus(status)
    for module in model.modules():
        state = get_quantization(module)
        if state is None:
            continue
        for stage, advance in _STAGES.items():
            if state.status < stage <= target:
                advance(module)


def enable_quantization(module: nn.Module) -> None:
    """Quantize the activations of a module again after `disable_quantization`."""
    module.quantization_enabled = True  # type: ignore[assignment]


def disable_quantization(module: nn.Module) -> None:
    """Do not quantize the activations of a module; weights that are frozen stay rounded.

    model.apply(disable_quantization)
    """
    module.quantization_enabled = False  # type: ignore[assignment]


def is_module_quantized(module: nn.Module) -> bool:
    """Return True if a config is attached to a layer."""
    return get_quantization(module) is not None


def is_model_quantized(model: nn.Module) -> bool:
    """Return True if a config is attached to any layer of a model."""
    return any(map(is_module_quantized, model.modules()))


_STAGES: Mapping[QuantizationStatus, Callable[[nn.Module], None]] = {
    QuantizationStatus.CALIBRATION: set_module_for_calibration,
    QuantizationStatus.FROZEN: freeze_module_quantization,
    QuantizationStatus.COMPRESSED: compress_quantized_weights,
}


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
