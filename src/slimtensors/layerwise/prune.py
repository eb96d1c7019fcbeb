"""Prune a model layer by layer."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, SingularError, SlimError, StatusError
from slimtensors.layerwise.engine import Batch, find_blocks, prepare_batch, record_calls
from slimtensors.layerwise.hessian import Change, Hessian, Tell
from slimtensors.layerwise.inputs import Layer, layers_of, watch_block, without_padding
from slimtensors.layerwise.quantize import Hessians, Progress
from slimtensors.layerwise.report import LayerReport, LayerResult, layer_report
from slimtensors.layerwise.resume import WorkFolder, compute_digests
from slimtensors.layerwise.sparsegpt import sparsegpt
from slimtensors.layerwise.structure import Structure, Unstructured
from slimtensors.layerwise.sweep import Grid, group_width
from slimtensors.quantization.affine import Params
from slimtensors.quantization.args import QuantizationArgs
from slimtensors.quantization.state import quantization_of
from slimtensors.storage import StrPath

Round = Callable[[Tensor, int], Tensor]
"""Returns what a column of a quantized weight becomes: numbers that its codes can mean."""


@dataclass(frozen=True)
class PruningTarget:
    """What is to become of one matrix."""

    share: float
    """Of zeros."""
    structure: Structure = field(default_factory=Unstructured)
    held: Tensor | None = None
    """Where zeros are that must stay."""
    round: Round | None = None
    """For a weight that is quantized already."""


class PruningMethod(Protocol):
    """A way to prune one matrix; its fields are its options."""

    name: ClassVar[str]

    @property
    def needs_inputs(self) -> bool:
        """Whether it has to see what flows into a layer."""
        ...

    def prune(
        self, weight: Tensor, hessian: Tensor | None, want: PruningTarget, *, tell: Tell
    ) -> Tensor:
        """Return the weight with its zeros."""
        ...


@dataclass(frozen=True)
class Magnitude:
    """The smallest weights of a layer go."""

    name: ClassVar[str] = "magnitude"
    needs_inputs: bool = False
    """Only to tell what pruning does to outputs."""

    def prune(
        self, weight: Tensor, hessian: Tensor | None, want: PruningTarget, *, tell: Tell
    ) -> Tensor:
        """Look at nothing but the weight."""
        return without(weight, want.structure.zeros(weight.abs().float(), want.share), want.held)


@dataclass(frozen=True)
class Wanda:
    """Weights of each output go that change it least, each for itself (Sun et al., 2023)."""

    name: ClassVar[str] = "wanda"
    needs_inputs: ClassVar[bool] = True

    def prune(
        self, weight: Tensor, hessian: Tensor | None, want: PruningTarget, *, tell: Tell
    ) -> Tensor:
        """Look at the size of the inputs."""
        assert hessian is not None, "it needs inputs"
        scores = weight.abs().float() * hessian.diagonal().sqrt()
        return without(weight, want.structure.zeros(scores, want.share, per_row=True), want.held)


@dataclass(frozen=True)
class SparseGPT:
    """Weights go column by column, and those after them make up for it (Frantar, 2023)."""

    name: ClassVar[str] = "sparsegpt"
    needs_inputs: ClassVar[bool] = True
    block_size: int = 128
    damping: float = 0.01

    def prune(
        self, weight: Tensor, hessian: Tensor | None, want: PruningTarget, *, tell: Tell
    ) -> Tensor:
        """Look at how inputs hang together."""
        assert hessian is not None, "it needs inputs"
        return sparsegpt(
            weight,
            hessian,
            want.share,
            structure=want.structure,
            held=want.held,
            block_size=self.block_size,
            damping=self.damping,
            round_column=want.round,
            tell=tell,
        )


def without(weight: Tensor, zeros: Tensor, held: Tensor | None) -> Tensor:
    """Return a weight with zeros, those that were held among them."""
    return weight.masked_fill(zeros if held is None else zeros | held, 0.0)


def check(weight: Tensor, want: PruningTarget) -> None:
    """Raise if a weight cannot be pruned as wanted."""
    want.structure.check(*weight.shape)
    if not weight.isfinite().all():
        raise ConfigError("NaN or infinity among its weights")


def prune_layer(
    layer: Layer, method: PruningMethod, hessians: Hessians, share: float, structure: Structure
) -> tuple[Tensor, LayerReport]:
    """Return the layer's weight with its zeros, and how that went. Zeros that are there stay."""
    begin = time.perf_counter()
    try:
        done = []
        for i, weight in enumerate(layer.matrices):
            held = weight == 0
            want = PruningTarget(share, structure, held if held.any() else None, _grid(layer, i))
            check(weight, want)
            done.append(_prune(weight, method, hessians.get((layer.name, i)), want))
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    pruned = [weight for weight, _ in done]
    whole = pruned[0] if layer.matrix.dim() == 2 else torch.stack(pruned)
    return whole, layer_report(layer.name, method.name, [told for _, told in done], begin=begin)


def _prune(
    weight: Tensor, method: PruningMethod, seen: Hessian | None, want: PruningTarget
) -> tuple[Tensor, LayerResult]:
    notes: list[str] = []
    simplest = Magnitude().prune(weight, None, want, tell=notes.append)
    if seen is None or not seen.largest.any():
        if method.name != Magnitude.name:
            notes.append("nothing but zeros, if anything, came in: pruned by magnitude")
        return simplest, LayerResult(Magnitude.name, notes=notes)
    hessian, used = seen.mean(), method.name
    try:
        pruned = method.prune(weight, hessian, want, tell=notes.append)
    except SingularError as error:
        notes.append(f"{error}: pruned by wanda")
        pruned, used = Wanda().prune(weight, hessian, want, tell=notes.append), Wanda.name
    return pruned, LayerResult(
        used,
        seen.tokens,
        notes,
        Change.between(weight, pruned, hessian),
        Change.between(weight, simplest, hessian),
    )


def _grid(layer: Layer, i: int) -> Round | None:
    """Return what keeps a weight that is quantized already on its grid."""
    if (args := layer.args) is None:
        return None
    state = quantization_of(layer.module)
    params = None if state is None else state.params.get(layer.weight.parameter)
    if params is None:
        raise StatusError("is quantized, but not by this run; load the model dense")
    if layer.matrix.dim() == 3:
        params = _of_expert(params, i)
    return _rounding(params, args, layer.matrices[i])


def _rounding(params: Params, args: QuantizationArgs, weight: Tensor) -> Round:
    rows, columns = weight.shape
    grid, width = Grid.of(params, args, rows), group_width(args, columns)
    group_of = None if params.g_idx is None else params.g_idx.tolist()

    def round(x: Tensor, column: int) -> Tensor:
        return grid.round(x, column // width if group_of is None else group_of[column])

    return round


def _of_expert(params: Params, i: int) -> Params:
    zero, whole = params.zero_point, params.global_scale
    return Params(
        params.scale[i],
        None if zero is None else zero[i],
        None if whole is None else whole[i],
    )


def prune_model(
    model: nn.Module,
    shares: Mapping[str, float],
    *,
    method: PruningMethod,
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
        made_of = compute_digests(
            model, layers.values(), batches, (method, structure, dict(shares))
        )
        work = WorkFolder(folder, made_of)
    run = _Run(model, layers, dict(shares), method, structure, work, progress)
    with prepare_batch(model):
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
    method: PruningMethod
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
        stack = record_calls(self.model, blocks, batches)
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
        self, layer: Layer, method: PruningMethod, hessians: Hessians, notes: Sequence[str]
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
