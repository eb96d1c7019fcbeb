"""State of a quantized module, and the hooks through which it computes."""

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
from slimtensors.quantization.formats import part
from slimtensors.quantization.layers import Weight
from slimtensors.quantization.observers import (
    ActivationObserver,
    Range,
    activation_params,
    observe_weight,
)
from slimtensors.tensor import Parts

_LOG = logging.getLogger(__name__)


@dataclass
class Report:
    """What was quantized, and what the caller should know about it."""

    groups: dict[str, list[str]] = field(default_factory=dict)
    """The layers of each group; keys and values in a cache count as `kv_cache`."""
    notes: list[str] = field(default_factory=list)
    """What was done otherwise than asked, and why; grows while layers are frozen."""

    def note(self, text: str) -> None:
        """Write something down, and log it."""
        self.notes.append(text)
        _LOG.warning(text)


@dataclass(frozen=True)
class LayerPlan:
    """How one layer is quantized."""

    name: str
    """Of the layer in its model."""
    group: str
    classes: Sequence[str]
    """By which targets may call it."""
    are_experts: bool = False
    """Whether its weights are stacks of those of many experts."""
    weights: tuple[Weight, ...] = ()
    weight_args: QuantizationArgs | None = None
    dense: Mapping[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """Shape and dtype of each weight."""
    format: str = "dense"
    activations: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    """By what they are: `input` and `output`, or `k` and `v`."""

    def key(self, name: str) -> str:
        """Return the name that something in the layer has in a state dict."""
        return f"{self.name}.{name}" if self.name else name


class Quantization(nn.Module):
    """The state of one quantized layer, attached to it as `layer.quantization`.

    Its numbers are buffers, so that they move to other devices with the model. They are part of its
    state dict only once the layer is compressed.
    """

    def __init__(self, plan: LayerPlan, report: Report) -> None:
        super().__init__()
        self.plan = plan
        self.report = report
        self.status = QuantizationStatus.INITIALIZED
        self.params: dict[str, Params] = {}
        """Of weights, by parameter, where an algorithm has found better ones than an observer."""
        self.siblings: tuple[Quantization, ...] = ()
        """The same layer in the other experts."""
        self.hooks: list[RemovableHandle] = []
        self.compressed_hooks: list[RemovableHandle] = []
        self._observers: dict[str, ActivationObserver] = {}

    def watch(self) -> None:
        """Begin to take note of what flows through."""
        self.status = QuantizationStatus.CALIBRATION
        static = {x: args for x, args in self.plan.activations.items() if args.dynamic is not True}
        self._observers = {which: ActivationObserver(args) for which, args in static.items()}

    def passed(self, which: str, x: Tensor) -> Tensor:
        """Return what remains of activations that flow by; in calibration, note and leave them."""
        args = self.plan.activations.get(which)
        if args is None or not x.numel():
            return x
        if self.status is QuantizationStatus.CALIBRATION and which in self._observers:
            self._observers[which].see(x)
        if self.status not in _QUANTIZED:
            return x
        if not args.dynamic:
            return fake_quantize(x, self._kept_params(which), args)
        whole = getattr(self, f"{which}_global_scale", None)
        return fake_quantize(x, find_dynamic_params(x, args, global_scale=whole), args)

    def freeze(self, layer: nn.Module) -> None:
        """Fix all scales, and put the layer's weights on the grid of their codes."""
        try:
            for which, args in self.plan.activations.items():
                if args.dynamic is not True:
                    params = activation_params(self._seen(which), args)
                    self.keep(_named(which, params, local=args.dynamic == "local"))
            for weight in self.plan.weights:
                self._freeze_weight(layer, weight)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.status = QuantizationStatus.FROZEN

    def requantize(self, layer: nn.Module) -> None:
        """Find the codes of a frozen layer anew, with its scales, once its weights have changed."""
        for weight in self.plan.weights:
            self._freeze_weight(layer, weight)

    def adopt(self, layer: nn.Module, version: str | None) -> None:
        """Freeze a layer with the numbers it keeps, as a release of theirs left them."""
        try:
            for which, args in self.plan.activations.items():
                if args.dynamic is not True:
                    whole = args.dynamic == "local"
                    part(self.kept(), f"{which}_global_scale" if whole else f"{which}_scale")
            for weight in self.plan.weights:
                self._adopt_weight(layer, weight, version)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.status = QuantizationStatus.FROZEN

    def keep(self, numbers: Mapping[str, Tensor]) -> None:
        """Keep numbers under the names they have on disk."""
        saved = self.status is QuantizationStatus.COMPRESSED
        for name, x in numbers.items():
            self.register_buffer(name, x, persistent=saved)

    def kept(self) -> dict[str, Tensor]:
        """Return all numbers: what is stored of the layer in place of its weights."""
        return {name: x for name, x in self._buffers.items() if x is not None}

    def turn(self, status: QuantizationStatus) -> None:
        """Go from frozen to compressed, or back."""
        self.status = status
        self.keep(self.kept())

    def dense_weight(self, weight: Weight) -> Tensor:
        """Return a weight as the layer has it, from the numbers that are kept of it."""
        args, (shape, dtype) = self.plan.weight_args, self.plan.dense[weight.parameter]
        assert args is not None, "a layer without quantized weights lists none"
        parts = parts_of(weight, self.kept())
        matrix = formats.find(self.plan.format).decompress(parts, args)
        return weight.shaped(matrix, shape).to(dtype)

    def _freeze_weight(self, layer: nn.Module, weight: Weight) -> None:
        args = self.plan.weight_args
        assert args is not None, "a layer without quantized weights lists none"
        own: Tensor = getattr(layer, weight.parameter)
        matrix = weight.matrix(own.detach())
        if (params := self.params.get(weight.parameter)) is None:
            params = observe_weight(matrix, args)
        else:  # the weight is on its grid; bf16 is too coarse to find 8-bit codes again
            matrix = matrix.float()
        parts = formats.find(self.plan.format).compress(matrix, params, args)
        self.keep({suffix.replace("weight", weight.parameter, 1): x for suffix, x in parts.items()})
        own.data.copy_(self.dense_weight(weight))

    def _adopt_weight(self, layer: nn.Module, weight: Weight, version: str | None) -> None:
        args = self.plan.weight_args
        assert args is not None, "a layer without quantized weights lists none"
        old = parts_of(weight, self.kept())
        codes, params = formats.find(self.plan.format, version=version).parse(old, args)
        for suffix in old:
            delattr(self, suffix)
        self.keep(formats.find(self.plan.format).store(codes, params, args))
        getattr(layer, weight.parameter).data.copy_(self.dense_weight(weight))

    def _seen(self, which: str) -> Range | None:
        """Return the range of activations; that of the other experts if this one saw no token."""
        own = self.seen(which)
        others = [seen for expert in self.siblings if (seen := expert.seen(which)) is not None]
        if own is not None or not others:
            return own
        self.report.note(
            f"{self.plan.name}: no token came here in calibration; its {which} takes the range of"
            f" the {len(others)} experts beside it that saw some"
        )
        low = torch.stack([low for low, _ in others]).amin(0)
        return low, torch.stack([high for _, high in others]).amax(0)

    def seen(self, which: str) -> Range | None:
        """Return the range of activations that were really seen here."""
        return self._observers[which].range() if which in self._observers else None

    def _kept_params(self, which: str) -> Params:
        scale: Tensor = getattr(self, f"{which}_scale")
        return Params(scale, getattr(self, f"{which}_zero_point", None))


_QUANTIZED = (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED)


def quantization_of(module: nn.Module) -> Quantization | None:
    """Return the state of a quantized layer; none if it is not one."""
    state = getattr(module, "quantization", None)
    return state if isinstance(state, Quantization) else None


def parts_of(weight: Weight, stored: Mapping[str, Tensor]) -> Parts:
    """Return those stored tensors that make up one weight, by their suffix on disk."""
    own = weight.parameter
    return {
        name.replace(own, "weight", 1): x
        for name, x in stored.items()
        if name == own or name.startswith(f"{own}_")
    }


def _named(which: str, params: Params, *, local: bool) -> Parts:
    given = {
        f"{which}_scale": None if local else params.scale,
        f"{which}_zero_point": params.zero_point,
        f"{which}_global_scale": params.global_scale,
    }
    return {name: x for name, x in given.items() if x is not None}


_CACHES = ("past_key_values", "past_key_value")


def attach_hooks(layer: nn.Module, state: Quantization) -> None:
    """Attach a state to a layer, so that its activations pass through it."""
    detach_hooks(layer)
    layer.quantization = state
    if state.plan.are_experts:
        return  # what flows between them is out of reach
    if "k" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_cache, with_kwargs=True))
    if "input" in state.plan.activations:
        state.hooks.append(layer.register_forward_pre_hook(_quantize_input, with_kwargs=True))
    if "output" in state.plan.activations:
        state.hooks.append(layer.register_forward_hook(_quantize_output))


def detach_hooks(layer: nn.Module) -> None:
    """Leave a layer without state and hooks."""
    state = quantization_of(layer)
    if state is not None:
        remove_hooks(state.hooks)
        remove_hooks(state.compressed_hooks)
        del layer.quantization


def remove_hooks(hooks: list[RemovableHandle]) -> None:
    """Take hooks away."""
    for hook in hooks:
        hook.remove()
    hooks.clear()


def attach_compressed_hooks(layer: nn.Module, state: Quantization) -> None:
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
