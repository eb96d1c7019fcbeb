"""Prune a model layer by layer."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError, SingularError, SlimError, StatusError
from slimtensors.layerwise.engine import Progress, Tensors, rewrite_layers
from slimtensors.layerwise.gptq import Grid, group_width
from slimtensors.layerwise.hessian import Hessian, HessianMap, NoteCallback
from slimtensors.layerwise.inputs import Batch, Layer, collect_layers, remove_padding
from slimtensors.layerwise.passes import evaluation_mode
from slimtensors.layerwise.report import LayerReport, MatrixReport, OutputChange, combine_matrices
from slimtensors.layerwise.resume import WorkFolder, compute_digests
from slimtensors.layerwise.sparsegpt import sparsegpt
from slimtensors.layerwise.structure import Structure, Unstructured
from slimtensors.layerwise.walk import Unit
from slimtensors.quantization.affine import Params
from slimtensors.quantization.state import get_quantization
from slimtensors.storage import StrPath

RoundColumn = Callable[[Tensor, int], Tensor]
"""Rounds the values of a column to the grid of a quantized weight."""


@dataclass(frozen=True)
class PruningTarget:
    """How one matrix is to be pruned."""

    share: float
    """Share of zeros."""
    structure: Structure = field(default_factory=Unstructured)
    held: Tensor | None = None
    """Positions of zeros that must stay."""
    round: RoundColumn | None = None
    """Rounding function of a weight that is already quantized."""


class PruningMethod(Protocol):
    """A method that prunes one matrix; its fields are its options."""

    name: ClassVar[str]

    @property
    def needs_inputs(self) -> bool:
        """Whether it requires the inputs of the layers."""
        ...

    def prune(
        self, weight: Tensor, hessian: Tensor | None, target: PruningTarget, *, tell: NoteCallback
    ) -> Tensor:
        """Return the pruned weight."""
        ...


@dataclass(frozen=True)
class Magnitude:
    """Prune the smallest weights of a layer."""

    name: ClassVar[str] = "magnitude"
    needs_inputs: bool = False
    """Set to True to report output errors; pruning itself does not use inputs."""

    def prune(
        self, weight: Tensor, hessian: Tensor | None, target: PruningTarget, *, tell: NoteCallback
    ) -> Tensor:
        """Prune by absolute value."""
        return _set_zeros(
            weight, target.structure.zeros(weight.abs().float(), target.share), target
        )


@dataclass(frozen=True)
class Wanda:
    """Prune, in each row, the weights with the smallest product with their inputs (Sun, 2023)."""

    name: ClassVar[str] = "wanda"
    needs_inputs: ClassVar[bool] = True

    def prune(
        self, weight: Tensor, hessian: Tensor | None, target: PruningTarget, *, tell: NoteCallback
    ) -> Tensor:
        """Prune by absolute value times the norm of the input."""
        assert hessian is not None, "Wanda needs inputs"
        scores = weight.abs().float() * hessian.diagonal().sqrt()
        return _set_zeros(
            weight, target.structure.zeros(scores, target.share, per_row=True), target
        )


@dataclass(frozen=True)
class SparseGPT:
    """Prune column by column; later columns compensate the error (Frantar, 2023)."""

    name: ClassVar[str] = "sparsegpt"
    needs_inputs: ClassVar[bool] = True
    block_size: int = 128
    damping: float = 0.01

    def prune(
        self, weight: Tensor, hessian: Tensor | None, target: PruningTarget, *, tell: NoteCallback
    ) -> Tensor:
        """Prune so that the outputs change least."""
        assert hessian is not None, "SparseGPT needs inputs"
        return sparsegpt(
            weight,
            hessian,
            target.share,
            structure=target.structure,
            held=target.held,
            block_size=self.block_size,
            damping=self.damping,
            round_column=target.round,
            tell=tell,
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
    """Set a share of the weights of each named layer to zero, in place, and return reports.

    Existing zeros stay, and quantized weights stay on their grid. `calibration` contains batches
    to run the model on, for methods that use inputs. Memory use, besides the model, is the inputs
    of one block and the Hessians of its layers. With a `folder`, an interrupted run resumes after
    the last finished layer.

    Example:
        >>> layers = find_layers(model, ["Linear"], ["lm_head"])
        >>> prune_model(model, dict.fromkeys(layers, 0.5), method=SparseGPT(), calibration=batches)
    """
    batches = remove_padding(model, calibration)
    if method.needs_inputs and not batches:
        raise ConfigError(f"{method.name} needs calibration data: pass calibration=...")
    all_layers = collect_layers(model)
    layers = {name: all_layers[name] for name in shares}
    structure = structure or Unstructured()
    work = None
    if folder is not None:
        options = (method, structure, dict(shares))
        work = WorkFolder(folder, compute_digests(model, layers.values(), batches, options))
    with evaluation_mode(model):
        reports = rewrite_layers(
            model,
            layers,
            _Pruner(method, structure, shares),
            batches if method.needs_inputs else (),
            work=work,
            progress=progress,
        )
    return tuple(reports[name] for name in layers)


@dataclass(frozen=True)
class _Pruner:
    """Rewriter that prunes each layer."""

    method: PruningMethod
    structure: Structure
    shares: Mapping[str, float]
    changes_blocks: ClassVar[bool] = False

    def prepare_block(self, unit: Unit) -> Tensors:
        return {}

    def compute(
        self, layer: Layer, hessians: HessianMap, missing: str | None
    ) -> tuple[Tensors, LayerReport]:
        method = self.method if missing is None else Magnitude()
        share = self.shares[layer.name]
        weight, report = prune_layer(layer, method, hessians, share, self.structure)
        if missing is not None and self.method.name != Magnitude.name:
            report = report.without_inputs(missing, "pruned by magnitude")
        return {"weight": weight}, report

    def apply(self, layer: Layer, tensors: Tensors) -> None:
        layer.set_weight(tensors["weight"])
        if (state := get_quantization(layer.module)) is not None:
            state.requantize(layer.module)


def prune_layer(
    layer: Layer, method: PruningMethod, hessians: HessianMap, share: float, structure: Structure
) -> tuple[Tensor, LayerReport]:
    """Return the pruned weight of a layer, and a report. Existing zeros stay."""
    started = time.perf_counter()
    results = []
    try:
        for i, weight in enumerate(layer.matrices):
            structure.check(*weight.shape)
            if not weight.isfinite().all():
                raise ConfigError("NaN or infinity in the weight")
            zeros = weight == 0
            round_column = _make_rounding(layer, i)
            target = PruningTarget(share, structure, zeros if zeros.any() else None, round_column)
            results.append(_prune_matrix(weight, method, hessians.get((layer.name, i)), target))
    except SlimError as error:
        raise type(error)(f"{layer.name}: {error}") from error
    pruned = [weight for weight, _ in results]
    weights = pruned[0] if layer.matrix.dim() == 2 else torch.stack(pruned)
    matrices = [report for _, report in results]
    return weights, combine_matrices(layer.name, method.name, matrices, started=started)


def _prune_matrix(
    weight: Tensor, method: PruningMethod, inputs: Hessian | None, target: PruningTarget
) -> tuple[Tensor, MatrixReport]:
    notes: list[str] = []
    baseline = Magnitude().prune(weight, None, target, tell=notes.append)
    if inputs is None or not inputs.largest.any():
        if method.name != Magnitude.name:
            notes.append("no nonzero inputs: pruned by magnitude")
        return baseline, MatrixReport(Magnitude.name, notes=notes)
    hessian, used = inputs.mean(), method.name
    try:
        pruned = method.prune(weight, hessian, target, tell=notes.append)
    except SingularError as error:
        notes.append(f"{error}: pruned by wanda")
        pruned, used = Wanda().prune(weight, hessian, target, tell=notes.append), Wanda.name
    return pruned, MatrixReport(
        used,
        inputs.tokens,
        notes,
        OutputChange.measure(weight, pruned, hessian),
        OutputChange.measure(weight, baseline, hessian),
    )


def _set_zeros(weight: Tensor, zeros: Tensor, target: PruningTarget) -> Tensor:
    return weight.masked_fill(zeros if target.held is None else zeros | target.held, 0.0)


def _make_rounding(layer: Layer, i: int) -> RoundColumn | None:
    """Return the rounding function of a quantized matrix; None if it is not quantized."""
    if (args := layer.args) is None:
        return None
    state = get_quantization(layer.module)
    params = None if state is None else state.params.get(layer.weight.parameter)
    if params is None:
        raise StatusError("was quantized by an earlier run; load the model with dense weights")
    if layer.matrix.dim() == 3:
        params = _select_expert(params, i)
    rows, columns = layer.matrices[i].shape
    grid, width = Grid.from_params(params, args, rows), group_width(args, columns)
    group_index = None if params.g_idx is None else params.g_idx.tolist()

    def round_column(x: Tensor, column: int) -> Tensor:
        return grid.round(x, column // width if group_index is None else group_index[column])

    return round_column


def _select_expert(params: Params, i: int) -> Params:
    zero_point, global_scale = params.zero_point, params.global_scale
    return Params(
        params.scale[i],
        None if zero_point is None else zero_point[i],
        None if global_scale is None else global_scale[i],
    )
