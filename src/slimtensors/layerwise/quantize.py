"""Quantize a model layer by layer."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, SingularError, SlimError, suggest
from slimtensors.layerwise.engine import Progress, Tensors, rewrite_layers
from slimtensors.layerwise.gptq import Rounded, gptq, rtn
from slimtensors.layerwise.hessian import Hessian, HessianMap, NoteCallback
from slimtensors.layerwise.inputs import Batch, Layer, collect_layers, remove_padding
from slimtensors.layerwise.passes import evaluation_mode, run_model
from slimtensors.layerwise.report import (
    LayerReport,
    MatrixReport,
    ModelReport,
    OutputChange,
    combine_matrices,
    summarize_missing_inputs,
)
from slimtensors.layerwise.resume import WorkFolder, compute_digests
from slimtensors.layerwise.smoothing import Smoothing, smooth_block
from slimtensors.layerwise.walk import Unit, find_blocks, group_by_block
from slimtensors.quantization.affine import Params
from slimtensors.quantization.apply import apply_quantization_config, freeze_module_quantization
from slimtensors.quantization.args import ActivationOrdering, QuantizationArgs, QuantizationStrategy
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.fused import group_fused, share_global_scale
from slimtensors.quantization.observers import observe_weight
from slimtensors.quantization.state import get_quantization
from slimtensors.storage import StrPath

_PARAMS = ("scale", "zero_point", "global_scale", "g_idx")


class QuantizationMethod(Protocol):
    """A method that quantizes one matrix; its fields are its options."""

    name: ClassVar[str]

    @property
    def needs_inputs(self) -> bool:
        """Whether it requires the inputs of the layers."""
        ...

    def round(
        self,
        weight: Tensor,
        hessian: Tensor | None,
        args: QuantizationArgs,
        *,
        tell: NoteCallback,
        params: Params | None = None,
    ) -> Rounded:
        """Return the quantized weight; zeros stay zeros.

        `params` are passed to layers that share a global scale, and to no others.
        """
        ...


@dataclass(frozen=True)
class RTN:
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    needs_inputs: bool = False
    """Set to True to report output errors; rounding itself does not use inputs."""

    def round(
        self,
        weight: Tensor,
        hessian: Tensor | None,
        args: QuantizationArgs,
        *,
        tell: NoteCallback,
        params: Params | None = None,
    ) -> Rounded:
        """Round each weight independently."""
        return rtn(weight, args, params=params)


@dataclass(frozen=True)
class GPTQ:
    """Round column by column with error compensation, in the order of `args.actorder`."""

    name: ClassVar[str] = "gptq"
    needs_inputs: ClassVar[bool] = True
    damping: float = 0.01
    static_groups: bool = True

    def round(
        self,
        weight: Tensor,
        hessian: Tensor | None,
        args: QuantizationArgs,
        *,
        tell: NoteCallback,
        params: Params | None = None,
    ) -> Rounded:
        """Round so that the outputs change least."""
        assert hessian is not None, "GPTQ needs inputs"
        mask = weight != 0
        return gptq(
            weight,
            hessian,
            args,
            mask=None if mask.all() else mask,
            params=params,
            damping=self.damping,
            static_groups=self.static_groups,
            tell=tell,
        )


METHODS: dict[str, QuantizationMethod] = {"rtn": RTN(), "gptq": GPTQ()}


def quantize_model(
    model: nn.Module,
    config: QuantizationConfig,
    *,
    calibration: Iterable[Batch] = (),
    method: str | QuantizationMethod = "gptq",
    smoothing: Smoothing | None = None,
    folder: StrPath | None = None,
    progress: Progress | None = None,
) -> ModelReport:
    """Quantize the layers selected by a config, in place, and freeze them.

    `calibration` contains batches to run the model on: mappings of arguments, or inputs. Weights
    that are zero stay zero. Memory use, besides the model, is the inputs of one block, as much
    again (at least 256 MB) for results that are used again, and the Hessians of its layers. With a
    `folder`, an interrupted run resumes after the last finished layer, with the same result; a
    folder of another model, config or data raises.

    Example:
        >>> config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
        >>> report = quantize_model(model, config, calibration=[{"input_ids": ids}])
        >>> [(layer.name, layer.error) for layer in report.layers]
    """
    algorithm, batches = _find_method(method), remove_padding(model, calibration)
    needs_inputs = algorithm.needs_inputs or smoothing is not None
    if not batches and (needs_inputs or config.needs_data):
        raise ConfigError("calibration data is required: pass calibration=...")
    applied = apply_quantization_config(
        model, replace(config, quantization_status=QuantizationStatus.INITIALIZED)
    )
    layers = {name: layer for name, layer in collect_layers(model).items() if layer.args}
    work = None
    if folder is not None:
        options = (algorithm, smoothing)
        work = WorkFolder(folder, compute_digests(model, layers.values(), batches, options))
    quantizer = _Quantizer(algorithm, smoothing, _find_fused(layers))
    if smoothing is not None and not group_by_block(layers, find_blocks(model)):
        quantizer.notes.append("nothing was smoothed: no layer to quantize is inside of a block")
    with evaluation_mode(model):
        reports = rewrite_layers(
            model,
            layers,
            quantizer,
            batches if needs_inputs else (),
            work=work,
            progress=progress,
        )
        _freeze(model, config, batches)
    results = tuple(reports.values())
    notes = (*applied.notes, *quantizer.notes, *summarize_missing_inputs(results))
    return ModelReport(results, quantizer.results, notes)


def _find_method(method: str | QuantizationMethod) -> QuantizationMethod:
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ConfigError(f"unknown method {method!r}; {suggest(method, METHODS)}")
    return METHODS[method]


def _freeze(model: nn.Module, config: QuantizationConfig, batches: Sequence[Batch]) -> None:
    if config.needs_data:
        for module in model.modules():
            if (state := get_quantization(module)) is not None:
                state.start_calibration(module)
        for batch in batches:
            run_model(model, batch)
    model.apply(freeze_module_quantization)


def _find_fused(layers: Mapping[str, Layer]) -> dict[str, Sequence[Layer]]:
    """Return all layers that have to share a global scale with others, with these others."""
    scaled = [
        name
        for name, layer in layers.items()
        if layer.args
        and layer.args.strategy is QuantizationStrategy.TENSOR_GROUP
        and layer.args.actorder is not ActivationOrdering.GROUP
        and layer.matrix.dim() == 2
    ]
    groups = [[layers[name] for name in group] for group in group_fused(scaled)]
    return {layer.name: group for group in groups for layer in group}


@dataclass
class _Quantizer:
    """Rewriter that quantizes each layer, after smoothing its block if requested."""

    method: QuantizationMethod
    smoothing: Smoothing | None
    fused: Mapping[str, Sequence[Layer]]
    """Layer -> all layers with which it shares a global scale."""
    results: dict[str, Rounded] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def changes_blocks(self) -> bool:
        return self.smoothing is not None

    def prepare_block(self, unit: Unit) -> Tensors:
        if self.smoothing is None:
            return {}
        changed, notes = smooth_block(unit, self.smoothing)
        self.notes += notes
        return changed

    def compute(
        self, layer: Layer, hessians: HessianMap, missing: str | None
    ) -> tuple[Tensors, LayerReport]:
        method = self.method if missing is None else RTN()
        result, report = quantize_layer(layer, method, hessians, self._find_scale(layer))
        if missing is not None and self.method.name != RTN.name:
            report = report.without_inputs(missing, "rounded to nearest")
        params = {key: getattr(result.params, key) for key in _PARAMS}
        tensors = {key: x for key, x in params.items() if x is not None}
        return {"weight": result.weight, **tensors}, report

    def _find_scale(self, layer: Layer) -> Tensor | None:
        """Return the global scale that a layer shares with others, or None."""
        group = self.fused.get(layer.name, ())
        for other in group:
            if other.name in self.results:  # its weight is rounded already
                return self.results[other.name].params.global_scale
        return share_global_scale(other.matrix for other in group) if group else None

    def apply(self, layer: Layer, tensors: Tensors) -> None:
        params = Params(**{key: tensors[key] for key in _PARAMS if key in tensors})
        layer.set_weight(tensors["weight"], params)
        self.results[layer.name] = Rounded(layer.matrix, params)


def quantize_layer(
    layer: Layer,
    method: QuantizationMethod,
    hessians: HessianMap,
    global_scale: Tensor | None = None,
) -> tuple[Rounded, LayerReport]:
    """Return the quantized weight of a layer, and a report; `global_scale` is a shared one."""
    args = layer.args
    assert args is not None, f"{layer.name} is not quantized"
    started = time.perf_counter()
    try:
        outcomes = [
            _quantize_matrix(matrix, method, hessians.get((layer.name, i)), args, global_scale)
            for i, matrix in enumerate(layer.matrices)
        ]
        results = [result for result, _ in outcomes]
        rounded = results[0] if layer.matrix.dim() == 2 else _stack_experts(results)
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    matrices = [report for _, report in outcomes]
    return rounded, combine_matrices(layer.name, method.name, matrices, started=started)


def _quantize_matrix(
    weight: Tensor,
    method: QuantizationMethod,
    inputs: Hessian | None,
    args: QuantizationArgs,
    global_scale: Tensor | None,
) -> tuple[Rounded, MatrixReport]:
    notes: list[str] = []
    shared: dict[str, Params] = {}
    if global_scale is not None:
        shared = {"params": observe_weight(weight, args, global_scale=global_scale)}
    baseline = rtn(weight, args, **shared)
    if inputs is None or not inputs.largest.any():
        if method.name != RTN.name:
            notes.append("no nonzero inputs: rounded to nearest")
        return baseline, MatrixReport(RTN.name, notes=notes)
    hessian = inputs.mean()
    result, used = baseline, RTN.name
    if method.name != RTN.name:
        try:
            result = method.round(weight, hessian, args, tell=notes.append, **shared)
            used = method.name
        except SingularError as error:
            notes.append(f"{error}: rounded to nearest")
    return result, MatrixReport(
        used,
        inputs.tokens,
        notes,
        OutputChange.measure(weight, result.weight, hessian),
        OutputChange.measure(weight, baseline.weight, hessian),
    )


def _stack_experts(experts: Sequence[Rounded]) -> Rounded:
    """Return the results of all experts as one stacked weight."""
    all_params = [expert.params for expert in experts]
    if any(params.g_idx is not None for params in all_params):
        raise ConfigError("actorder 'group' is not supported for stacked experts; use 'weight'")

    def stack(key: str) -> Tensor | None:
        parts = [getattr(params, key) for params in all_params]
        if parts[0] is None:
            return None
        return torch.stack([x.reshape(-1, x.shape[-1]) if x.dim() else x for x in parts])

    scale = stack("scale")
    assert scale is not None
    params = Params(scale, stack("zero_point"), stack("global_scale"))
    return Rounded(torch.stack([expert.weight for expert in experts]), params)
