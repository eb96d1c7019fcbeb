"""Prune a model layer by layer, each on inputs that the layers before it, pruned, give."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from slimtensors.container import StrPath
from slimtensors.errors import ConfigError
from slimtensors.pruning.layer import prune_layer
from slimtensors.pruning.methods import Magnitude, Method
from slimtensors.pruning.structure import Structure, Unstructured
from slimtensors.quantization.algorithms import LayerReport, Progress
from slimtensors.quantization.algorithms.blocks import Batch, find_blocks, ready
from slimtensors.quantization.algorithms.digest import digests
from slimtensors.quantization.algorithms.layers import Layer, layers_of
from slimtensors.quantization.algorithms.padding import without_padding
from slimtensors.quantization.algorithms.recording import record
from slimtensors.quantization.algorithms.round import Hessians
from slimtensors.quantization.algorithms.watch import watch_block
from slimtensors.quantization.algorithms.work import WorkFolder
from slimtensors.quantization.state import quantization_of


def prune_model(
    model: nn.Module,
    shares: Mapping[str, float],
    *,
    method: Method,
    structure: Structure | None = None,
    calibration: Iterable[Batch] = (),
    folder: StrPath | None = None,
    progress: Progress | None = None,
) -> tuple[LayerReport, ...]:
    """Set a share of the weights of each named layer to zero, in place, and tell how that went.

    Zeros that are there stay, and weights that are quantized stay on their grid. `calibration`
    are batches that the model is run on, where the method looks at inputs. In memory are, besides
    the model, the inputs of one block and the Hessians of its layers. With a `folder`, a run that
    was killed goes on after the last layer that was finished.
    """
    batches = without_padding(model, calibration)
    if method.needs_inputs and not batches:
        raise ConfigError(f"{method.name} needs calibration data, and there is none")
    known = layers_of(model)
    layers = {name: known[name] for name in shares}
    structure = structure or Unstructured()
    work = None
    if folder is not None:
        made_of = digests(model, layers.values(), batches, (method, structure, dict(shares)))
        work = WorkFolder(folder, made_of)
    run = _Run(model, layers, dict(shares), method, structure, work, progress)
    with ready(model):
        if method.needs_inputs and not run.is_finished(layers):
            run.do_blocks(batches)
        run.do_others()
    return tuple(run.reports[name] for name in layers)


@dataclass
class _Run:
    """A model on its way, and what has been done so far."""

    model: nn.Module
    layers: Mapping[str, Layer]
    shares: Mapping[str, float]
    method: Method
    structure: Structure
    work: WorkFolder | None
    progress: Progress | None
    reports: dict[str, LayerReport] = field(default_factory=dict)

    def is_finished(self, names: Iterable[str]) -> bool:
        """Tell whether an earlier run has done all these."""
        return self.work is not None and all(self.work.has(name) for name in names)

    def do_blocks(self, batches: Sequence[Batch]) -> None:
        """Go through the blocks of the model, as far as there is something to prune."""
        blocks = find_blocks(self.model)
        targets = {
            block: [name for name in self.layers if name.startswith(f"{block}.")]
            for block in blocks
        }
        left = [block for block in blocks if targets[block]]
        if not left:
            return
        stack = record(self.model, blocks, batches)
        for block in blocks:
            hessians: Hessians = {}
            if targets[block] and not self.is_finished(targets[block]):
                layers = [self.layers[name] for name in targets[block]]
                inputs = watch_block(stack, block, layers, {})
                hessians = {reader: each.hessian for each in inputs for reader in each.readers}
            for name in targets[block]:
                self._do_layer(self.layers[name], self.method, hessians, ())
            if block == left[-1]:
                break
            stack.advance(block)

    def do_others(self) -> None:
        """Prune what is left by magnitude."""
        note = "lies outside of the repeated blocks: pruned by magnitude"
        notes = () if self.method.name == Magnitude.name else (note,)
        for name, layer in self.layers.items():
            if name not in self.reports:
                self._do_layer(layer, Magnitude(), {}, notes)

    def _do_layer(
        self, layer: Layer, method: Method, hessians: Hessians, notes: Sequence[str]
    ) -> None:
        name = layer.name
        if self.work is not None and self.work.has(name):
            weight, report = self.work.load_tensors(name)["weight"], self.work.report(name)
        else:
            share = self.shares[name]
            weight, report = prune_layer(layer, method, hessians, share, self.structure)
            report = replace(report, notes=(*notes, *report.notes))
            if self.work is not None:
                self.work.store_tensors(name, {"weight": weight}, report.to_json())
        layer.put(weight)
        if (state := quantization_of(layer.module)) is not None:
            state.requantize(layer.module)
        self.reports[name] = report
        if self.progress is not None:
            self.progress(report, len(self.reports), len(self.layers))
