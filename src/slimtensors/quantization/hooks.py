"""Hooks that apply the state of a quantized layer when the layer runs."""

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimtensors.errors import ConfigError
from slimtensors.quantization import formats
from slimtensors.quantization.config import QuantizationStatus
from slimtensors.quantization.state import ACTIVATION_SUFFIXES, Quantization, get_quantization


def attach_hooks(layer: nn.Module, state: Quantization) -> None:
    """Attach a state to a layer, with hooks that quantize its activations."""
    detach_hooks(layer)
    layer.quantization = state
    layer.quantization_scheme = state.plan.scheme  # type: ignore[assignment]
    layer.quantization_status = state.status  # type: ignore[assignment]
    state.hooks.append(layer.register_load_state_dict_pre_hook(_load_scales))  # type: ignore[no-untyped-call]
    if state.plan.has_stacked_experts:
        return  # activations between experts cannot be hooked
    if "k" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_wrap_cache, with_kwargs=True))
    if "input" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_input, with_kwargs=True))
    if "output" in state.plan.activations:
        state.hooks.append(layer.register_forward_hook(_quantize_output))


def _load_scales(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    """Load scales that a state dict has beside a dense weight, and round the weight to them."""
    state = _get_state(layer)
    names = (*formats.SUFFIXES, *ACTIVATION_SUFFIXES)
    found = {
        name: state_dict[f"{prefix}{name}"] for name in names if f"{prefix}{name}" in state_dict
    }
    if state.status is not QuantizationStatus.FROZEN or found.keys() <= {"weight"}:
        return
    state.load_stored(layer, found, version=None)
    for name in found.keys() - {"weight"}:
        del state_dict[f"{prefix}{name}"]
    for weight in state.plan.weights:
        state_dict[f"{prefix}{weight.parameter}"] = state.dense_weight(weight)


def detach_hooks(layer: nn.Module) -> None:
    """Remove state and hooks from a layer."""
    state = get_quantization(layer)
    if state is not None:
        remove_hooks(state.hooks)
        remove_hooks(state.compressed_hooks)
        del layer.quantization, layer.quantization_scheme, layer.quantization_status


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


def quantize_activation(layer: nn.Module, which: str, x: Tensor) -> Tensor:
    """Quantize an activation of a layer, unless `disable_quantization` was called on the layer."""
    enabled: bool = getattr(layer, "quantization_enabled", True)
    return _get_state(layer).quantize_activations(which, x, enabled=enabled)


def _quantize_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if args:
        return (quantize_activation(layer, "input", args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, kwargs | {first: quantize_activation(layer, "input", kwargs[first])}


def _quantize_output(layer: nn.Module, args: object, output: Tensor) -> Tensor:
    return quantize_activation(layer, "output", output)


_CACHE_ARGUMENTS = ("past_key_values", "past_key_value")


class QuantizedCache:
    """Wrapper of a model's cache that quantizes keys and values when they are added."""

    def __init__(self, cache: Any, layer: nn.Module) -> None:
        self._cache = cache
        self._layer = layer

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Quantize keys and values, and store them if there is a cache."""
        key = quantize_activation(self._layer, "k", key)
        value = quantize_activation(self._layer, "v", value)
        if self._cache is None:
            return key, value
        cached: tuple[Tensor, Tensor] = self._cache.update(key, value, *args, **kwargs)
        return cached

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _wrap_cache(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = next((name for name in _CACHE_ARGUMENTS if name in kwargs), _CACHE_ARGUMENTS[0])
    return args, kwargs | {name: QuantizedCache(kwargs.get(name), layer)}


_ATTENTION = "slimtensors_quantized_"
"""Prefix of the attention implementations that quantize queries."""


def quantize_queries(model: nn.Module) -> None:
    """Select an attention implementation of transformers that also quantizes queries.

    It calls the implementation that was selected before. Layers without a scheme are unaffected.
    """
    select = getattr(model, "set_attn_implementation", None)
    if select is None:
        raise ConfigError(
            "queries can be quantized only in models of transformers; use kv_cache_scheme to"
            " quantize only keys and values"
        )
    from transformers import AttentionInterface, AttentionMaskInterface

    config: Any = model.config
    original: str = config._attn_implementation
    if original.startswith(_ATTENTION):
        return
    name = f"{_ATTENTION}{original}"
    AttentionInterface.register(name, partial(_attend, original))
    AttentionMaskInterface.register(name, AttentionMaskInterface()[original])
    select(name)


def _attend(original: str, layer: nn.Module, query: Tensor, *args: Any, **kwargs: Any) -> Any:
    state = get_quantization(layer)
    if state is not None and "q" in state.plan.activations:
        query = quantize_activation(layer, "q", query)
    return _find_attention(original, layer)(layer, query, *args, **kwargs)


def _find_attention(name: str, layer: nn.Module) -> Callable[..., Any]:
    """Return an attention implementation; models define `eager` in their own module."""
    from transformers import AttentionInterface

    eager = getattr(sys.modules[type(layer).__module__], "eager_attention_forward", None)
    found: Callable[..., Any] = AttentionInterface().get_interface(name, eager)
    return found


def _get_state(layer: nn.Module) -> Quantization:
    state = get_quantization(layer)
    assert state is not None, "hooks are attached together with the state"
    return state
