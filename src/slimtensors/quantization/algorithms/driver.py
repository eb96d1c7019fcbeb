"""Quantize a model layer by layer, each on inputs that the layers before it, quantized, give."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from slimtensors.container import StrPath
from slimtensors.errors import ConfigError
from slimtensors.quantization.algorithms.blocks import Batch, Stack, find_blocks, ready, run
from slimtensors.quantization.algorithms.digest import digests
from slimtensors.quantization.algorithms.layers import Layer, layers_of
from slimtensors.quantization.algorithms.methods import RTN, Method, find_method
from slimtensors.quantization.algorithms.padding import without_padding
from slimtensors.quantization.algorithms.recording import record
from slimtensors.quantization.algorithms.report import LayerReport, ModelReport
from slimtensors.quantization.algorithms.round import Hessians, round_layer
from slimtensors.quantization.algorithms.rtn import Rounded
from slimtensors.quantization.algorithms.smooth import norms_of, smooth_block
from slimtensors.quantization.algorithms.smoothing import Smoothing
from slimtensors.quantization.algorithms.watch import watch_block
from slimtensors.quantization.algorithms.work import WorkFolder
from slimtensors.quantization.apply import apply_quantization_config, freeze_module_quantization
from slimtensors.quantization.config import QuantizationConfig, QuantizationStatus
from slimtensors.quantization.state import quantization_of

Progress = Callable[[LayerReport, int, int], object]
"""Called after each layer with what was done, how many are done, and how many there are."""


def quantize_model(
    model: nn.Module,
    config: QuantizationConfig,
    *,
    calibration: Iterable[Batch] = (),
    method: str | Method = "gptq",
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
        work = WorkFolder(folder, digests(model, layers.values(), batches, (how, smoothing)))
    todo = _Run(model, layers, how, smoothing, work, progress)
    with ready(model):
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
            run(model, batch)
    model.apply(freeze_module_quantization)


@dataclass
class _Run:
    """A model on its way, and what has been done so far."""

    model: nn.Module
    layers: Mapping[str, Layer]
    method: Method
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
        stack = record(self.model, blocks, batches)
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
        self, layer: Layer, method: Method, hessians: Hessians, notes: Sequence[str]
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
