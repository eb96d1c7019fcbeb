"""What is kept about one quantized layer: how, how far, and in which numbers."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from slimtensors.errors import SlimError, StatusError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params, fake_quantize, find_dynamic_params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.config import QuantizationStatus
from slimtensors.quantization.layers import Weight
from slimtensors.quantization.observers import ActivationObserver, activation_params, observe_weight
from slimtensors.quantization.observers.minmax import Range
from slimtensors.spec import Parts

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
class Plan:
    """How one layer is quantized."""

    name: str
    """Of the layer in its model."""
    group: str
    weights: tuple[Weight, ...] = ()
    weight_args: QuantizationArgs | None = None
    format: str = "dense"
    activations: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    """By what they are: `input` and `output`, or `k` and `v`."""


class Quantization(nn.Module):
    """The state of one quantized layer, attached to it as `layer.quantization`.

    Its numbers are buffers that are not saved with the model: they move to other devices with it,
    while its state dict stays that of the dense model until it is compressed.
    """

    def __init__(self, plan: Plan, report: Report) -> None:
        super().__init__()
        self.plan = plan
        self.report = report
        self.status = QuantizationStatus.INITIALIZED
        self.params: dict[str, Params] = {}
        """Of weights, by parameter, if an algorithm found better ones than the observer would."""
        self.siblings: tuple[Quantization, ...] = ()
        """The same layer of other experts."""
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
        if self.status not in (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED):
            return x
        return fake_quantize(x, self._activation_params(which, x, args), args)

    def freeze(self, layer: nn.Module) -> None:
        """Fix all scales, and put the layer's weights on the grid of their codes."""
        try:
            for which, args in self.plan.activations.items():
                if args.dynamic is not True:
                    self.keep(_named(which, activation_params(self._seen(which), args), args))
            for weight in self.plan.weights:
                self._freeze_weight(layer, weight)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.status = QuantizationStatus.FROZEN

    def keep(self, numbers: Mapping[str, Tensor]) -> None:
        """Keep numbers under the names they have on disk."""
        for name, x in numbers.items():
            self.register_buffer(name, x, persistent=False)

    def take(self) -> dict[str, Tensor]:
        """Give away all numbers that were kept."""
        kept = {name: x for name, x in self._buffers.items() if x is not None}
        for name in kept:
            delattr(self, name)
        return kept

    def parts(self, layer: nn.Module) -> dict[str, Tensor]:
        """Return what is stored of the layer in place of its weights, by name on disk."""
        holder = layer if self.status is QuantizationStatus.COMPRESSED else self
        names = self.stored if holder is layer else list(self._buffers)
        return {name: getattr(holder, name) for name in names}

    def dense(self, weight: Weight, parts: Mapping[str, Tensor]) -> Tensor:
        """Return the matrix of a weight, or the stack of them, from what is stored."""
        args = self.plan.weight_args
        assert args is not None, "only weights that are quantized are asked for"
        own = {
            name.replace(weight.parameter, "weight", 1): x
            for name, x in parts.items()
            if name == weight.parameter or name.startswith(f"{weight.parameter}_")
        }
        stored = formats.find(self.plan.format)
        if weight.parameter == "weight":
            return stored.decompress(own, args)
        experts = len(next(iter(own.values())))
        each = [stored.decompress({k: x[i] for k, x in own.items()}, args) for i in range(experts)]
        return torch.stack(each)
