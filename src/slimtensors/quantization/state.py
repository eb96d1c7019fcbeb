"""State of a quantized layer."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from slimtensors.errors import SlimError, StatusError
from slimtensors.quantization import formats
from slimtensors.quantization.affine import Params, fake_quantize, find_dynamic_params
from slimtensors.quantization.args import QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.config import QuantizationStatus
from slimtensors.quantization.formats import check_params, require_part
from slimtensors.quantization.layers import Weight
from slimtensors.quantization.observers import (
    ActivationObserver,
    Range,
    compute_activation_params,
    observe_weight,
)
from slimtensors.quantization.scheme import QuantizationScheme
from slimtensors.tensor import Parts

_LOG = logging.getLogger(__name__)

ACTIVATION_SUFFIXES = tuple(
    f"{activation}_{param}"
    for activation in ("input", "output", "q", "k", "v")
    for param in ("scale", "zero_point", "global_scale")
)
"""Suffixes of the tensors that are stored for static activations."""


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
    scheme: QuantizationScheme
    has_stacked_experts: bool = False
    """Whether its weights stack those of several experts."""
    weights: tuple[Weight, ...] = ()
    weight_args: QuantizationArgs | None = None
    dense: Mapping[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """Shape and dtype of each dense weight, by parameter."""
    format: str = "dense"
    activations: Mapping[str, QuantizationArgs] = field(default_factory=dict)
    """Arguments by activation: `input` and `output`, or `q`, `k` and `v`."""

    def key(self, name: str) -> str:
        """Return the state dict key of a tensor of the layer."""
        return f"{self.name}.{name}" if self.name else name


class Quantization(nn.Module):
    """State of one quantized layer, attached to it as `layer.quantization`.

    Scales and codes are buffers, so that they move between devices with the model. They are in its
    state dict only while the layer is compressed. While it is frozen, scales are floats and zero
    points have the shape of the scales; otherwise all are as stored.
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

    def start_calibration(self, layer: nn.Module) -> None:
        """Start to observe activations."""
        self.set_status(layer, QuantizationStatus.CALIBRATION)
        self._observers = {
            which: ActivationObserver(self.plan.activations[which])
            for which in self.list_static_activations()
        }

    def quantize_activations(self, which: str, x: Tensor, *, enabled: bool = True) -> Tensor:
        """Return activations fake-quantized; in calibration, observe and return them unchanged."""
        args = self.plan.activations.get(which)
        if args is None or not x.numel():
            return x
        if self.status is QuantizationStatus.CALIBRATION and which in self._observers:
            self._observers[which].observe(x)
        if self.status not in _QUANTIZED or not enabled:
            return x
        if not args.dynamic:
            zero = getattr(self, f"{which}_zero_point", None)
            return fake_quantize(x, Params(self._get_scale(f"{which}_scale"), zero), args)
        global_scale = self._get_scale(f"{which}_global_scale") if args.dynamic == "local" else None
        return fake_quantize(x, find_dynamic_params(x, args, global_scale=global_scale), args)

    def freeze(self, layer: nn.Module, *, requires_data: bool = True) -> None:
        """Fix all scales and round the weights of the layer.

        Without `requires_data`, static scales that were not observed remain to be loaded.
        """
        try:
            for which in self.list_static_activations():
                observed = self._find_range(which)
                if observed is None and not requires_data:
                    continue
                args = self.plan.activations[which]
                params = compute_activation_params(observed, args)
                self.set_tensors(_name_params(which, params, local=args.dynamic == "local"))
            for weight in self.plan.weights:
                self._freeze_weight(layer, weight)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.set_status(layer, QuantizationStatus.FROZEN)

    def list_static_activations(self) -> list[str]:
        """Return the activations with scales that are not computed at run time."""
        return [x for x, args in self.plan.activations.items() if args.dynamic is not True]

    def requantize(self, layer: nn.Module) -> None:
        """Quantize the weights of a frozen layer again after they have changed."""
        for weight in self.plan.weights:
            self._freeze_weight(layer, weight)

    def load_stored(
        self, layer: nn.Module, tensors: Mapping[str, Tensor], version: str | None
    ) -> None:
        """Freeze a layer with the tensors that a release of compressed-tensors stored."""
        try:
            self.load_activation_params(tensors)
            for weight in self.plan.weights:
                self._load_stored_weight(layer, weight, select_parts(weight, tensors), version)
        except SlimError as error:
            raise type(error)(f"{self.plan.name}: {error}") from error
        self.set_status(layer, QuantizationStatus.FROZEN)

    def load_activation_params(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the static scales of activations from stored tensors."""
        for which in self.list_static_activations():
            args = self.plan.activations[which]
            names = ["global_scale"] if args.dynamic == "local" else ["scale"]
            if args.strategy is QuantizationStrategy.TENSOR_GROUP and not args.dynamic:
                names.append("global_scale")
            if not args.symmetric:
                names.append("zero_point")  # symmetric ones are stored by older releases: zeros
            self.set_tensors(
                {f"{which}_{name}": require_part(tensors, f"{which}_{name}") for name in names}
            )

    def set_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Register tensors as buffers, under their names on disk."""
        persistent = self.status is QuantizationStatus.COMPRESSED
        for name, x in tensors.items():
            self.register_buffer(name, x, persistent=persistent)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that are stored for the layer instead of its weights."""
        buffers = {name: x for name, x in self._buffers.items() if x is not None}
        if self.status is not QuantizationStatus.COMPRESSED:
            for weight in self.plan.weights:
                parts = select_parts(weight, buffers)
                if parts:
                    encoded = self._format.encode_params(parts, self._weight_args)
                    buffers |= _rename_parts(weight, encoded)
        return buffers

    def set_status(self, layer: nn.Module, status: QuantizationStatus) -> None:
        """Change the status, here and where scripts for compressed-tensors expect it."""
        tensors, was_compressed = self.tensors(), self.status is QuantizationStatus.COMPRESSED
        self.status = layer.quantization_status = status  # type: ignore[assignment]
        if was_compressed or status is QuantizationStatus.COMPRESSED:
            self.set_tensors(tensors)
        if was_compressed:
            for weight in self.plan.weights:
                self._set_stored(weight, select_parts(weight, tensors))

    def dense_weight(self, weight: Weight) -> Tensor:
        """Return a weight of the layer, decompressed from its stored tensors."""
        shape, dtype = self.plan.dense[weight.parameter]
        parts = select_parts(weight, self.tensors())
        matrix = self._format.decompress(parts, self._weight_args)
        return weight.from_matrix(matrix, shape).to(dtype)

    @property
    def _weight_args(self) -> QuantizationArgs:
        args = self.plan.weight_args
        assert args is not None, "only layers with weight_args list weights"
        return args

    @property
    def _format(self) -> formats.Format:
        return formats.find(self.plan.format)

    def _set_stored(self, weight: Weight, parts: Mapping[str, Tensor]) -> None:
        """Register the stored tensors of a weight, its params decoded."""
        decoded = self._format.decode_params(parts, self._weight_args)
        self.set_tensors(_rename_parts(weight, decoded))

    def _freeze_weight(self, layer: nn.Module, weight: Weight) -> None:
        args = self._weight_args
        parameter: Tensor = getattr(layer, weight.parameter)
        matrix = weight.to_matrix(parameter.detach())
        if (params := self.params.get(weight.parameter)) is None:
            params = observe_weight(matrix, args)
        else:  # the weight is already rounded; bf16 is too coarse to recover 8-bit codes
            matrix = matrix.float()
        self._set_stored(weight, self._format.compress(matrix, params, args))
        parameter.data.copy_(self.dense_weight(weight))

    def _load_stored_weight(
        self, layer: nn.Module, weight: Weight, parts: Parts, version: str | None
    ) -> None:
        args = self._weight_args
        if is_stored_dense(parts):  # the scales are final, but the weight is not yet rounded
            matrix = weight.to_matrix(parts["weight"])
            params = read_dense_params(parts, args, tuple(matrix.shape))
            stored = self._format.compress(matrix, params, args)
        else:
            codes, params = formats.find(self.plan.format, version=version).parse(parts, args)
            stored = self._format.store(codes, params, args)
        self._set_stored(weight, stored)
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

    def _get_scale(self, name: str) -> Tensor:
        scale: Tensor | None = getattr(self, name, None)
        if scale is None:
            raise StatusError(
                f"{self.plan.name}: {name} is not set; load it, for example by"
                " load_pretrained_quantization_parameters, or calibrate before freezing"
            )
        return scale


_QUANTIZED = (QuantizationStatus.FROZEN, QuantizationStatus.COMPRESSED)


def get_quantization(module: nn.Module) -> Quantization | None:
    """Return the state of a quantized layer, or None for any other module."""
    state = getattr(module, "quantization", None)
    return state if isinstance(state, Quantization) else None


def is_stored_dense(parts: Mapping[str, Tensor]) -> bool:
    """Return True if the weight of a layer is stored dense, with its scales."""
    weight = parts.get("weight")
    return weight is not None and weight.is_floating_point() and weight.element_size() > 1


def read_dense_params(parts: Parts, args: QuantizationArgs, shape: tuple[int, ...]) -> Params:
    """Return the params that are stored beside a dense weight."""
    params = Params(
        require_part(parts, "weight_scale"),
        None if args.symmetric else require_part(parts, "weight_zero_point"),
        parts.get("weight_global_scale"),
    )
    return check_params(shape, params, args)


def _rename_parts(weight: Weight, parts: Mapping[str, Tensor]) -> Parts:
    """Return parts under the name of their parameter, the reverse of `select_parts`."""
    return {suffix.replace("weight", weight.parameter, 1): x for suffix, x in parts.items()}


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
