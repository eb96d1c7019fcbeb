"""State of a quantized layer, and the hooks that apply it."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimtensors.errors import SlimError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params, fake_quantize, find_dynamic_params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.config import QuantizationStatus
from slimtensors.quantization.formats import require_part
from slimtensors.quantization.layers import Weight
from slimtensors.quantization.observers import (
    ActivationObserver,
    Range,
    compute_activation_params,
    observe_weight,
)
from slimtensors.tensor import Parts

_LOG = logging.getLogger(__name__)


@dataclass
class Report:
    """Result of `apply_quantization_config`: the layers of each group, and notes."""

    groups: dict[str, list[str]] = field(default_factory=dict)
    """Layer names by group; attention layers with a quantized cache are in `kv_cache`."""
    notes: list[str] = field(default_factory=list)
    """Deviations from the config and their reasons; freezing may add some."""

    def note(self, text: str) -> None:
        """Add a note and log it as a warning."""
        self.notes.append(text)
        _LOG.warning(text)


@dataclass(frozen=True)
class LayerPlan:
    """How a layer is quantized."""

    name: str
    """Name of the layer in its model."""
    group: str
    classes: Sequence[str]
    """Class names that targets may use for the layer."""
    has_stacked_experts: bool = False
    """Whether its weights stack those of several experts."""
    weights: tuple[Weight, ...] = ()
    weight_args: QuantizationArgs | None = None
    dense: Mapping[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """Shape and dtype of each dense weight, by parameter."""
    format: str = "dense"
    activations: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    """Arguments by activation: `input` and `output`, or `k` and `v`."""

    def key(self, name: str) -> str:
        """Return the state dict key of a tensor of the layer."""
        return f"{self.name}.{name}" if self.name else name


class Quantization(nn.Module):
    """State of one quantized layer, attached to it as `layer.quantization`.

    Scales and codes are buffers, so that they move between devices with the model. They are in its
    state dict only while the layer is compressed.
    """

    def __init__(self, plan: LayerPlan, report: Report) -> None:
        super().__init__()
        self.plan = plan
        self.report = report
        self.status = QuantizationStatus.INITIALIZED
        self.params: dict[str, Params] = {}
        """Params of weights, by parameter, that an algorithm found instead of an observer."""
        self.siblings: tuple[Quantization, ...] = ()
        """The same layer in the other experts."""
        self.hooks: list[RemovableHandle] = []
        self.compressed_hooks: list[RemovableHandle] = []
        self._observers: dict[str, ActivationObserver] = {}

    def start_calibration(self) -> None:
        """Start to observe activations."""
        self.status = QuantizationStatus.CALIBRATION
        static = {x: args for x, args in self.plan.activations.items() if args.dynamic is not True}
        self._observers = {which: ActivationObserver(args) for which, args in static.items()}

    def quantize_activations(self, which: str, x: Tensor) -> Tensor:
        """Return activations fake-quantized; in calibration, observe and return them unchanged."""
        args = self.plan.activations.get(which)
        if args is None or not x.numel():
            return x
        if self.status is QuantizationStatus.CALIBRATION and which in self._observers:
            self._observers[which].observe(x)
        if self.status not in _QUANTIZED:
            return x
        if not args.dynamic:
            return fake_quantize(x, self._get_activation_params(which), args)
        global_scale = getattr(self, f"{which}_global_scale", None)
        return fake_quantize(x, find_dynamic_params(x, args, global_scale=global_scale), args)

    def freeze(self, layer: nn.Module) -> None:
        """Fix all scales and round the weights of the layer."""
        try:
            for which, args in self.plan.activations.items():
                if args.dynamic is not True:
                    params = compute_activation_params(self._find_range(which), args)
                    self.set_tensors(_name_params(which, params, local=args.dynamic == "local"))
            for weight in self.plan.weights:
                self._freeze_weight(layer, weight)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.status = QuantizationStatus.FROZEN

    def requantize(self, layer: nn.Module) -> None:
        """Quantize the weights of a frozen layer again after they have changed."""
        for weight in self.plan.weights:
            self._freeze_weight(layer, weight)

    def load_stored(self, layer: nn.Module, version: str | None) -> None:
        """Freeze a layer with tensors that a release of compressed-tensors stored."""
        try:
            for which, args in self.plan.activations.items():
                if args.dynamic is not True:
                    suffix = "global_scale" if args.dynamic == "local" else "scale"
                    require_part(self.tensors(), f"{which}_{suffix}")
            for weight in self.plan.weights:
                self._load_stored_weight(layer, weight, version)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.status = QuantizationStatus.FROZEN

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Register stored tensors as buffers, under their names on disk."""
        persistent = self.status is QuantizationStatus.COMPRESSED
        for name, x in tensors.items():
            self.register_buffer(name, x, persistent=persistent)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are stored for the layer instead of its weights."""
        return {name: x for name, x in self._buffers.items() if x is not None}

    def set_status(self, status: QuantizationStatus) -> None:
        """Change the status between frozen and compressed."""
        self.status = status
        self.set_tensors(self.tensors())

    def dense_weight(self, weight: Weight) -> Tensor:
        """Return a weight of the layer, decompressed from its stored tensors."""
        args, (shape, dtype) = self.plan.weight_args, self.plan.dense[weight.parameter]
        assert args is not None, "only layers with weight_args list weights"
        parts = select_parts(weight, self.tensors())
        matrix = formats.find(self.plan.format).decompress(parts, args)
        return weight.from_matrix(matrix, shape).to(dtype)

    def _freeze_weight(self, layer: nn.Module, weight: Weight) -> None:
        args = self.plan.weight_args
        assert args is not None, "only layers with weight_args list weights"
        parameter: Tensor = getattr(layer, weight.parameter)
        matrix = weight.to_matrix(parameter.detach())
        if (params := self.params.get(weight.parameter)) is None:
            params = observe_weight(matrix, args)
        else:  # the weight is already rounded; bf16 is too coarse to recover 8-bit codes
            matrix = matrix.float()
        parts = formats.find(self.plan.format).compress(matrix, params, args)
        self.set_tensors(
            {suffix.replace("weight", weight.parameter, 1): x for suffix, x in parts.items()}
        )
        parameter.data.copy_(self.dense_weight(weight))

    def _load_stored_weight(self, layer: nn.Module, weight: Weight, version: str | None) -> None:
        args = self.plan.weight_args
        assert args is not None, "only layers with weight_args list weights"
        stored = select_parts(weight, self.tensors())
        codes, params = formats.find(self.plan.format, version=version).parse(stored, args)
        for suffix in stored:
            delattr(self, suffix)
        self.set_tensors(formats.find(self.plan.format).store(codes, params, args))
        getattr(layer, weight.parameter).data.copy_(self.dense_weight(weight))

    def observed_range(self, which: str) -> Range | None:
        """Return the range of activations observed by this layer, or None before any data."""
        return self._observers[which].range() if which in self._observers else None

    def _find_range(self, which: str) -> Range | None:
        """Return the observed range, or that of the other experts if this one has no data."""
        observed = self.observed_range(which)
        ranges = [expert.observed_range(which) for expert in self.siblings]
        others = [other for other in ranges if other is not None]
        if observed is not None or not others:
            return observed
        self.report.note(
            f"{self.plan.name}: received no token in calibration; its {which} uses the range of"
            f" the {len(others)} other experts that received some"
        )
        low = torch.stack([low for low, _ in others]).amin(0)
        return low, torch.stack([high for _, high in others]).amax(0)

    def _get_activation_params(self, which: str) -> Params:
        scale: Tensor = getattr(self, f"{which}_scale")
        return Params(scale, getattr(self, f"{which}_zero_point", None))


_QUANTIZED = (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED)


def get_quantization(module: nn.Module) -> Quantization | None:
    """Return the state of a quantized layer, or None for any other module."""
    state = getattr(module, "quantization", None)
    return state if isinstance(state, Quantization) else None


def select_parts(weight: Weight, stored: Mapping[str, Tensor]) -> Parts:
    """Return the stored tensors of one weight, by suffix."""
    parameter = weight.parameter
    return {
        name.replace(parameter, "weight", 1): x
        for name, x in stored.items()
        if name == parameter or name.startswith(f"{parameter}_")
    }


def _name_params(which: str, params: Params, *, local: bool) -> Parts:
    tensors = {
        f"{which}_scale": None if local else params.scale,
        f"{which}_zero_point": params.zero_point,
        f"{which}_global_scale": params.global_scale,
    }
    return {name: x for name, x in tensors.items() if x is not None}


_CACHE_ARGUMENTS = ("past_key_values", "past_key_value")


def attach_hooks(layer: nn.Module, state: Quantization) -> None:
    """Attach a state to a layer, with hooks that quantize its activations."""
    detach_hooks(layer)
    layer.quantization = state
    if state.plan.has_stacked_experts:
        return  # activations between experts cannot be hooked
    if "k" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_cache, with_kwargs=True))
    if "input" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_input, with_kwargs=True))
    if "output" in state.plan.activations:
        state.hooks.append(layer.register_forward_hook(_quantize_output))


def detach_hooks(layer: nn.Module) -> None:
    """Remove state and hooks from a layer."""
    state = get_quantization(layer)
    if state is not None:
        remove_hooks(state.hooks)
        remove_hooks(state.compressed_hooks)
        del layer.quantization


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Remove hooks and clear the list."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


def attach_compressed_hooks(layer: nn.Module, state: Quantization) -> None:
    """Add hooks that decompress the weights for each call, and rename tensors in state dicts."""
    state.compressed_hooks = [
        layer.register_forward_pre_hook(_decompress_weights),
        layer.register_forward_hook(_drop_weights, always_call=True),
        layer.register_state_dict_post_hook(_rename_for_saving),  # type: ignore[no-untyped-call]
        layer.register_load_state_dict_pre_hook(_rename_for_loading),  # type: ignore[no-untyped-call]
    ]


def _decompress_weights(layer: nn.Module, args: object) -> None:
    """Set dense weights for the duration of a call."""
    state = _get_state(layer)
    for weight in state.plan.weights:
        layer.__dict__[weight.parameter] = state.dense_weight(weight)


def _drop_weights(layer: nn.Module, args: object, output: object) -> None:
    for weight in _get_state(layer).plan.weights:
        layer.__dict__.pop(weight.parameter, None)


def _rename_for_saving(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
) -> None:
    for name in _get_state(layer).tensors():
        state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}quantization.{name}")


def _rename_for_loading(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    for name in _get_state(layer).tensors():
        if (stored := f"{prefix}{name}") in state_dict:
            state_dict[f"{prefix}quantization.{name}"] = state_dict.pop(stored)


class QuantizedCache:
    """Wrapper of a model's cache that quantizes keys and values when they are added."""

    def __init__(self, cache: Any, state: Quantization) -> None:
        self._cache = cache
        self._state = state

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Quantize keys and values, and store them if there is a cache."""
        quantize = self._state.quantize_activations
        key, value = quantize("k", key), quantize("v", value)
        if self._cache is None:
            return key, value
        cached: tuple[Tensor, Tensor] = self._cache.update(key, value, *args, **kwargs)
        return cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _quantize_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    quantize = _get_state(layer).quantize_activations
    if args:
        return (quantize("input", args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, kwargs | {first: quantize("input", kwargs[first])}


def _quantize_output(layer: nn.Module, args: object, output: Tensor) -> Tensor:
    return _get_state(layer).quantize_activations("output", output)


def _quantize_cache(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = next((name for name in _CACHE_ARGUMENTS if name in kwargs), _CACHE_ARGUMENTS[0])
    return args, kwargs | {name: QuantizedCache(kwargs.get(name), _get_state(layer))}


def _get_state(layer: nn.Module) -> Quantization:
    state = get_quantization(layer)
    assert state is not None, "hooks are attached and removed with the state"
    return state
