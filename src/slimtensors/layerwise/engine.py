"""Run a model block by block and rewrite its layers one after the other.

`rewrite_layers` is the driver that quantization and pruning share: it runs the model, records the
inputs of its layers, lets a `Rewriter` compute new weights, reports progress and resumes.

A layer is rewritten when everything that runs before it is finished: its inputs are those that it
has in the finished model. If a block or a layer runs several times per batch, the inputs of all
its runs are used; those of later runs are computed with its original weights.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor, nn

from slimtensors.layerwise.hessian import HessianMap
from slimtensors.layerwise.inputs import Batch, Layer
from slimtensors.layerwise.report import LayerReport
from slimtensors.layerwise.resume import WorkFolder
from slimtensors.layerwise.walk import Unit, Walk

Progress = Callable[[LayerReport, int, int], object]
"""Called after each layer with its report, the number of finished layers, and the total."""

Tensors = Mapping[str, Tensor]

NOT_USED = "not used with the calibration data"

OBSERVER: ContextVar[Callable[[Layer, HessianMap], object] | None] = ContextVar(
    "observer", default=None
)
"""Called with the Hessians of each layer before it is rewritten."""


class Rewriter(Protocol):
    """Computes new weights for one layer at a time."""

    @property
    def changes_blocks(self) -> bool:
        """Whether `prepare_block` changes parameters, so that they are stored for resuming."""
        ...

    def prepare_block(self, unit: Unit) -> Tensors:
        """Change a block before its layers are rewritten; return all changed parameters."""
        ...

    def compute(
        self, layer: Layer, hessians: HessianMap, missing: str | None
    ) -> tuple[Tensors, LayerReport]:
        """Return new tensors for a layer; `missing` is the reason if it has no inputs."""
        ...

    def apply(self, layer: Layer, tensors: Tensors) -> None:
        """Write the tensors of a layer to the model."""
        ...


def rewrite_layers(
    model: nn.Module,
    layers: Mapping[str, Layer],
    rewriter: Rewriter,
    batches: Sequence[Batch],
    *,
    work: WorkFolder | None = None,
    progress: Progress | None = None,
) -> dict[str, LayerReport]:
    """Rewrite layers in place and return their reports by name.

    With batches, layers are rewritten in the order in which the model uses them, so that their
    inputs come from layers that are already rewritten. Without batches, and if its product is
    not observed, a layer is rewritten without inputs. Layers that `work`
    contains are loaded instead of computed.
    """
    run = _Run(model, layers, rewriter, work, progress)
    run.load_finished()
    if batches and len(run.reports) < len(layers):
        run.rewrite_units(batches)
    for name, layer in layers.items():
        if name not in run.reports:
            run.rewrite_layer(layer, {}, NOT_USED if batches else None)
    return run.reports


@dataclass
class _Run:
    """State of `rewrite_layers`."""

    model: nn.Module
    layers: Mapping[str, Layer]
    rewriter: Rewriter
    work: WorkFolder | None
    progress: Progress | None
    reports: dict[str, LayerReport] = field(default_factory=dict)

    def load_finished(self) -> None:
        """Load the blocks and layers that the work folder contains, in their order."""
        if self.work is None:
            return
        for name in self.work.list_finished():
            tensors = self.work.load(name)
            if name in self.layers:
                report = LayerReport.from_json(self.work.load_report(name))
                self._finish(self.layers[name], tensors, report)
                continue
            for key, x in tensors.items() if self.rewriter.changes_blocks else ():
                self.model.get_parameter(key).data.copy_(x)

    def rewrite_units(self, batches: Sequence[Batch]) -> None:
        """Rewrite the layers that the model uses, in the order of their use."""
        walk = Walk.plan(self.model, self.layers, batches)
        for name, reason in walk.find_unobservable().items():
            if name not in self.reports:
                self.rewrite_layer(self.layers[name], {}, reason)
        finished = {*self.reports}
        with closing(walk.iterate_units(finished)) as units:
            for unit in units:
                self._rewrite_unit(unit)

    def _rewrite_unit(self, unit: Unit) -> None:
        if unit.module is not None and self.rewriter.changes_blocks:
            if self.work is None:
                self.rewriter.prepare_block(unit)
            elif not self.work.has(unit.name):
                self.work.store(unit.name, self.rewriter.prepare_block(unit))
        for group in unit.groups:
            hessians = unit.compute_hessians(group)
            for layer in group:
                is_seen = any((layer.name, i) in hessians for i in range(layer.count))
                self.rewrite_layer(layer, hessians, None if is_seen else NOT_USED)

    def rewrite_layer(self, layer: Layer, hessians: HessianMap, missing: str | None) -> None:
        """Compute the new tensors of a layer, write them to the model, and report."""
        if (observe := OBSERVER.get()) is not None:
            observe(layer, hessians)
        tensors, report = self.rewriter.compute(layer, hessians, missing)
        if self.work is not None:
            self.work.store(layer.name, tensors, report.to_json())
        self._finish(layer, tensors, report)

    def _finish(self, layer: Layer, tensors: Tensors, report: LayerReport) -> None:
        self.rewriter.apply(layer, tensors)
        self.reports[layer.name] = report
        if self.progress is not None:
            self.progress(report, len(self.reports), len(self.layers))
