"""Quantize a model layer by layer."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, SingularError, SlimError, nearest
from slimtensors.layerwise.engine import (
    Batch,
    Stack,
    find_blocks,
    prepare_batch,
    record_calls,
    run_block,
)
from slimtensors.layerwise.gptq import Rounded, gptq, rtn
from slimtensors.layerwise.hessian import Change, Hessian, Tell
from slimtensors.layerwise.inputs import Layer, layers_of, watch_block, without_padding
from slimtensors.layerwise.report import LayerReport, LayerResult, ModelReport, layer_report
from slimtensors.layerwise.resume import WorkFolder, compute_digests
from slimtensors.layerwise.smoothing import Smoothing, norms_of, smooth_block
from slimtensors.quantization.affine import Params
from slimtensors.quantization.apply import apply_quantization_config, freeze_module_quantization
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.state import quantization_of
from slimtensors.storage import StrPath


class QuantizationMethod(Protocol):
    """A way to choose the codes of one matrix; its fields are its options."""

    name: ClassVar[str]

    @property
    def needs_inputs(self) -> bool:
        """Whether it has to see what flows into a layer."""
        ...

    def round(
        self, weight: Tensor, hessian: Tensor | None, args: QuantizationArgs, *, tell: Tell
    ) -> Rounded:
        """Return the weight on its grid; zeros stay zeros."""
        ...


@dataclass(frozen=True)
class RTN:
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    needs_inputs: bool = False
    """Only to tell what rounding does to outputs."""

    def round(
        self, weight: Tensor, hessian: Tensor | None, args: QuantizationArgs, *, tell: Tell
    ) -> Rounded:
        """Round each weight for itself."""
        return rtn(weight, args)


@dataclass(frozen=True)
class GPTQ:
    """Round column by column, making up for errors; the order is `args.actorder`."""

    name: ClassVar[str] = "gptq"
    needs_inputs: ClassVar[bool] = True
    damping: float = 0.01
    static_groups: bool = True

    def round(
        self, weight: Tensor, hessian: Tensor | None, args: QuantizationArgs, *, tell: Tell
    ) -> Rounded:
        """Round so that outputs change least."""
        assert hessian is not None, "it needs inputs"
        mask = weight != 0
        return gptq(
            weight,
            hessian,
            args,
            mask=None if mask.all() else mask,
            damping=self.damping,
            static_groups=self.static_groups,
            tell=tell,
        )


METHODS: dict[str, QuantizationMethod] = {"rtn": RTN(), "gptq": GPTQ()}


def find_method(method: str | QuantizationMethod) -> QuantizationMethod:
    """Return the method of this name."""
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}; {nearest(method, METHODS)}")
    return METHODS[method]


Hessians = Mapping[tuple[str, int], Hessian]
"""What was seen to flow into each matrix, by its layer's name and its number there."""


def round_layer(
    layer: Layer, method: QuantizationMethod, hessians: Hessians
) -> tuple[Rounded, LayerReport]:
    """Return the layer's weight on its grid, and how that went."""
    args = layer.args
    assert args is not None, "only layers that are to be quantized come here"
    begin = time.perf_counter()
    try:
        done = [
            _round(matrix, method, hessians.get((layer.name, i)), args)
            for i, matrix in enumerate(layer.matrices)
        ]
        results = [result for result, _ in done]
        whole = results[0] if layer.matrix.dim() == 2 else _stacked(results)
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    return whole, layer_report(layer.name, method.name, [told for _, told in done], begin=begin)


def _round(
    weight: Tensor, method: QuantizationMethod, seen: Hessian | None, args: QuantizationArgs
) -> tuple[Rounded, LayerResult]:
    notes: list[str] = []
    nearest = rtn(weight, args)
    if seen is None or not seen.largest.any():
        if method.name != RTN.name:
            notes.append("nothing but zeros, if anything, came in: rounded to nearest")
        return nearest, LayerResult(RTN.name, notes=notes)
    hessian = seen.mean()
    result, used = nearest, RTN.name
    if method.name != RTN.name:
        try:
            result, used = method.round(weight, hessian, args, tell=notes.append), method.name
        except SingularError as error:
            notes.append(f"{error}: rounded to nearest")
    return result, LayerResult(
        used,
        seen.tokens,
        notes,
        Change.between(weight, result.weight, hessian),
        Change.between(weight, nearest.weight, hessian),
    )


def _stacked(done: Sequence[Rounded]) -> Rounded:
    """Return the experts as one."""
    all_params = [each.params for each in done]
    if any(params.g_idx is not None for params in all_params):
        raise ConfigError("stacked experts have no columns in common to order; use actorder weight")

    def stack(key: str) -> Tensor | None:
        parts = [getattr(params, key) for params in all_params]
        if parts[0] is None:
            return None
        return torch.stack([x.reshape(-1, x.shape[-1]) if x.dim() else x for x in parts])

    scale = stack("scale")
    assert scale is not None
    params = Params(scale, stack("zero_point"), stack("global_scale"))
    return Rounded(torch.stack([each.weight for each in done]), params)


Progress = Callable[[LayerReport, int, int], object]
"""Called after each layer with what was done, how many are done, and how many there are."""


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
    """Quantize the layers that a config names, in place, and freeze them.

    `calibration` are batches that the model is run on: mappings of arguments, or inputs. Weights
    that are zero stay zero. In memory are, besides the model, the inputs of one block and the
    Hessians of its layers. With a `folder`, a run that was killed goes on after the last layer that
    was finished, with the same result; a folder begun with another model, config or data raises.
    """
    how, batches = find_method(method), without_padding(model, calibration)
    needs_inputs = how.needs_inputs or smoothing is not None
    if not batches and (needs_inputs or config.needs_data):
        raise ConfigError("this needs calibration data, and there is none: pass calibration=...")
    applied = apply_quantization_config(
        model, replace(config, quantization_status=QuantizationStatus.INITIALIZED)
    )
    layers = {name: layer for name, layer in layers_of(model).items() if layer.args}
    work = None
    if folder is not None:
        work = WorkFolder(
            folder, compute_digests(model, layers.values(), batches, (how, smoothing))
        )
    todo = _Run(model, layers, how, smoothing, work, progress)
    with prepare_batch(model):
        if needs_inputs:
            todo.do_blocks(batches)
        todo.do_others()
        _freeze(model, config, batches)
    return ModelReport(tuple(todo.reports), todo.results, (*applied.notes, *todo.notes))


def put_results(model: nn.Module, results: Mapping[str, Rounded]) -> None:
    """Put weights on their grid into a model to which the config was applied, not yet frozen."""
    layers = layers_of(model)
    for name, (weight, params) in results.items():
        if name not in layers or layers[name].args is None:
            raise ConfigError(
                f"{name}: is not to be quantized in this model; apply the config first"
            )
        layers[name].put(weight, params)


def _freeze(model: nn.Module, config: QuantizationConfig, batches: Sequence[Batch]) -> None:
    if config.needs_data:
        for module in model.modules():
            if (state := quantization_of(module)) is not None:
                state.watch()
        for batch in batches:
            run_block(model, batch)
    model.apply(freeze_module_quantization)


@dataclass
class _Run:
    """A model on its way, and what has been done so far."""

    model: nn.Module
    layers: Mapping[str, Layer]
    method: QuantizationMethod
    smoothing: Smoothing | None
    work: WorkFolder | None
    progress: Progress | None
    results: dict[str, Rounded] = field(default_factory=dict)
    reports: list[LayerReport] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def do_blocks(self, batches: Sequence[Batch]) -> None:
        """Go through the blocks of the model, as far as there is something to quantize."""
        blocks = find_blocks(self.model)
        targets = {
            block: [layer for name, layer in self.layers.items() if name.startswith(f"{block}.")]
            for block in blocks
        }
        left = [block for block in blocks if targets[block]]
        if not left:
            self.notes.append("nothing to quantize lies in the blocks that the model repeats")
            return
        stack = record_calls(self.model, blocks, batches)
        for block in blocks:
            self._do_block(stack, block, targets[block])
            if block == left[-1]:
                break
            stack.advance(block)

    def do_others(self) -> None:
        """Round what no block holds."""
        note = "lies outside of the repeated blocks: rounded to nearest"
        notes = [] if self.method.name == RTN.name else [note]
        for name, layer in self.layers.items():
            if name not in self.results:
                self._do_layer(layer, RTN(), {}, notes)

    def _do_block(self, stack: Stack, block: str, layers: Sequence[Layer]) -> None:
        smoothed: list[str] = []
        hessians: Hessians = {}
        if not self._is_finished(block, layers):
            module = stack.blocks[block]
            every = layers_of(module, prefix=block).values()
            watched = every if self.smoothing else [each for each in every if each.args]
            inputs = watch_block(stack, block, watched, norms_of(module, prefix=block))
            if self.smoothing is not None:
                smoothed, notes = smooth_block(stack, block, inputs, self.smoothing)
                self.notes += notes
            hessians = {reader: each.hessian for each in inputs for reader in each.readers}
        elif self.work is not None and self.smoothing is not None:
            for name, x in self.work.load_tensors(block).items():
                self.model.get_parameter(name).data.copy_(x)
        for layer in layers:
            self._do_layer(layer, self.method, hessians, [])
        if self.work is not None and self.smoothing is not None and not self.work.has(block):
            changed = {name: self.model.get_parameter(name).data for name in smoothed}
            self.work.store_tensors(block, changed)

    def _is_finished(self, block: str, layers: Sequence[Layer]) -> bool:
        if self.work is None:
            return False
        names = [layer.name for layer in layers] if self.smoothing is None else [block]
        return all(self.work.has(name) for name in names)

    def _do_layer(
        self, layer: Layer, method: QuantizationMethod, hessians: Hessians, notes: Sequence[str]
    ) -> None:
        if self.work is not None and self.work.has(layer.name):
            result, report = self.work.load(layer.name)
        else:
            result, report = round_layer(layer, method, hessians)
            report = replace(report, notes=(*notes, *report.notes))
            if self.work is not None:
                self.work.store(layer.name, result, report)
        layer.put(result.weight, result.params)
        self.results[layer.name] = Rounded(layer.matrix, result.params)
        self.reports.append(report)
        if self.progress is not None:
            self.progress(report, len(self.reports), len(self.layers))
