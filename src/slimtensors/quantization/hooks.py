"""How a quantized layer computes: torch's hooks around its own, unchanged forward."""

from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimtensors.quantization.state import Quantization, quantization_of

_CACHES = ("past_key_values", "past_key_value")


def attach(layer: nn.Module, state: Quantization) -> None:
    """Attach a state to a layer, so that its activations pass through it."""
    detach(layer)
    layer.quantization = state
    if state.plan.are_experts:
        return  # what flows between them is out of reach
    if "k" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_cache, with_kwargs=True))
    if "input" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_input, with_kwargs=True))
    if "output" in state.plan.activations:
        state.hooks.append(layer.register_forward_hook(_quantize_output))


def detach(layer: nn.Module) -> None:
    """Leave a layer without state and hooks."""
    state = quantization_of(layer)
    if state is not None:
        remove(state.hooks)
        remove(state.compressed_hooks)
        del layer.quantization


def remove(hooks: list[RemovableHandle]) -> None:
    """Take hooks away."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


def attach_compressed(layer: nn.Module, state: Quantization) -> None:
    """Let a layer compute without weights of its own, and save what is kept in their place."""
    state.compressed_hooks = [
        layer.register_forward_pre_hook(_show_weights),
        layer.register_forward_hook(_hide_weights, always_call=True),
        layer.register_state_dict_post_hook(_name_as_on_disk),  # type: ignore[no-untyped-call]
        layer.register_load_state_dict_pre_hook(_name_as_in_memory),  # type: ignore[no-untyped-call]
    ]


def _show_weights(layer: nn.Module, args: object) -> None:
    """Give a layer dense weights for as long as it computes."""
    state = _state(layer)
    for weight in state.plan.weights:
        layer.__dict__[weight.parameter] = state.dense_weight(weight)


def _hide_weights(layer: nn.Module, args: object, output: object) -> None:
    for weight in _state(layer).plan.weights:
        layer.__dict__.pop(weight.parameter, None)


def _name_as_on_disk(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: object
) -> None:
    for name in _state(layer).kept():
        state_dict[f"{prefix}{name}"] = state_dict.pop(f"{prefix}quantization.{name}")


def _name_as_in_memory(
    layer: nn.Module, state_dict: dict[str, Any], prefix: str, *others: object
) -> None:
    for name in _state(layer).kept():
        if (stored := f"{prefix}{name}") in state_dict:
            state_dict[f"{prefix}quantization.{name}"] = state_dict.pop(stored)


class QuantizedCache:
    """Stands before a model's cache: keys and values are quantized as they go in."""

    def __init__(self, cache: Any, state: Quantization) -> None:
        self._cache = cache
        self._state = state

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Quantize keys and values, and store them if there is a cache."""
        key, value = self._state.passed("k", key), self._state.passed("v", value)
        if self._cache is None:
            return key, value
        both: tuple[Tensor, Tensor] = self._cache.update(key, value, *args, **kwargs)
        return both

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def _quantize_input(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    passed = _state(layer).passed
    if args:
        return (passed("input", args[0]), *args[1:]), kwargs
    first = next(iter(kwargs))
    return args, kwargs | {first: passed("input", kwargs[first])}


def _quantize_output(layer: nn.Module, args: object, output: Tensor) -> Tensor:
    return _state(layer).passed("output", output)


def _quantize_cache(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    name = next((name for name in _CACHES if name in kwargs), _CACHES[0])
    return args, kwargs | {name: QuantizedCache(kwargs.get(name), _state(layer))}


def _state(layer: nn.Module) -> Quantization:
    state = quantization_of(layer)
    assert state is not None, "hooks come and go with the state"
    return state
