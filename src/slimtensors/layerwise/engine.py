"""Run a model block by block and rewrite its layers one after the other.

`rewrite_layers` is the driver that quantization and pruning share: it runs the blocks, records the
inputs of their layers, lets a `Rewriter` compute new weights, reports progress and resumes.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.layerwise.hessian import HessianMap
from slimtensors.layerwise.inputs import Batch, InputRecorder, Layer, SharedInputs
from slimtensors.layerwise.report import LayerReport
from slimtensors.layerwise.resume import WorkFolder

Progress = Callable[[LayerReport, int, int], object]
"""Called after each layer with its report, the number of finished layers, and the total."""

Tensors = Mapping[str, Tensor]

_HIDDEN = "hidden_states"
"""Name of a block's main argument, if the model passes it by name."""


class Rewriter(Protocol):
    """Computes new weights for one layer at a time."""

    @property
    def changes_blocks(self) -> bool:
        """Whether `prepare_block` changes parameters, so that they are stored for resuming."""
        ...

    def prepare_block(
        self, stack: "BlockStack", block: str, layers: Sequence[Layer]
    ) -> tuple[HessianMap, Tensors]:
        """Run a block; return the Hessians of its layers, and all parameters changed by it."""
        ...

    def compute(self, layer: Layer, hessians: HessianMap | None) -> tuple[Tensors, LayerReport]:
        """Return new tensors for a layer; `hessians` is None for layers outside the blocks."""
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

    With batches, the model runs block by block, so that the inputs of each block come from blocks
    that are already rewritten. Layers outside the blocks, and all layers if there are no batches,
    are rewritten without inputs. Layers that `work` contains are loaded instead of computed.
    """
    run = _Run(model, layers, rewriter, work, progress)
    if batches:
        run.rewrite_blocks(batches)
    for name, layer in layers.items():
        if name not in run.reports:
            run.rewrite_layer(layer, None)
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

    def rewrite_blocks(self, batches: Sequence[Batch]) -> None:
        """Rewrite the layers of each block, up to the last block that contains any."""
        blocks = find_blocks(self.model)
        targets = group_by_block(self.layers, blocks)
        if not targets:
            return
        last = [*targets][-1]
        is_finished = all(self._is_finished(block, targets[block]) for block in targets)
        stack = None if is_finished else record_calls(self.model, blocks, batches)
        for block in blocks:
            if block in targets:
                self._rewrite_block(stack, block, targets[block])
            if block == last:
                break
            if stack is not None:
                stack.advance(block)

    def _rewrite_block(
        self, stack: "BlockStack | None", block: str, layers: Sequence[Layer]
    ) -> None:
        hessians: HessianMap = {}
        changed: Tensors = {}
        if stack is not None and not self._is_finished(block, layers):
            hessians, changed = self.rewriter.prepare_block(stack, block, layers)
        elif self.work is not None and self.rewriter.changes_blocks:
            for name, x in self.work.load(block).items():
                self.model.get_parameter(name).data.copy_(x)
        for layer in layers:
            self.rewrite_layer(layer, hessians)
        if self.work is not None and self.rewriter.changes_blocks and not self.work.has(block):
            self.work.store(block, changed)

    def _is_finished(self, block: str, layers: Sequence[Layer]) -> bool:
        """Return True if the work folder contains a block; its own entry is written last."""
        if self.work is None:
            return False
        names = [block] if self.rewriter.changes_blocks else [layer.name for layer in layers]
        return all(map(self.work.has, names))

    def rewrite_layer(self, layer: Layer, hessians: HessianMap | None) -> None:
        """Compute or load the new tensors of a layer, write them to the model, and report."""
        if self.work is not None and self.work.has(layer.name):
            tensors: Tensors = self.work.load(layer.name)
            report = LayerReport.from_json(self.work.load_report(layer.name))
        else:
            tensors, report = self.rewriter.compute(layer, hessians)
            if self.work is not None:
                self.work.store(layer.name, tensors, report.to_json())
        self.rewriter.apply(layer, tensors)
        self.reports[layer.name] = report
        if self.progress is not None:
            self.progress(report, len(self.reports), len(self.layers))


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the repeated blocks of a model: its longest list of modules of one class."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    }
    if not lists:
        raise ConfigError(
            "the model has no list of blocks of one class;"
            " apply_quantization_config supports any model"
        )
    # A block may contain a longer list, of experts; only outermost lists are candidates.
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    name = max(outer, key=lambda n: (len(outer[n]), _count_parameters(outer[n])))
    return {f"{name}.{i}": block for i, block in enumerate(outer[name])}


def group_by_block(layers: Mapping[str, Layer], blocks: Iterable[str]) -> dict[str, list[Layer]]:
    """Return the layers of each block that contains any, in the order of the blocks."""
    groups = {
        block: [layer for name, layer in layers.items() if name.startswith(f"{block}.")]
        for block in blocks
    }
    return {block: group for block, group in groups.items() if group}


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable gradients, dropout and fused experts (if the model can) within the context."""
    training = [module for module in model.modules() if module.training]
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    with ExitStack() as stack, torch.no_grad():
        model.eval()
        for module in training:  # not module.train(), which would also affect its children
            stack.callback(setattr, module, "training", True)
        if experts not in (None, "eager"):
            choose: Callable[[str], None] = model.set_experts_implementation  # type: ignore[assignment]
            choose("eager")
            stack.callback(choose, experts)
        yield


def run_model(model: nn.Module, batch: Batch) -> None:
    """Run a model on one batch, without a key-value cache."""
    options: dict[str, Any] = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False  # blocks run several times and must not accumulate state
    if isinstance(batch, Mapping):
        model(**{**batch, **options})
    elif isinstance(batch, Sequence):
        model(*batch, **options)
    else:
        model(batch, **options)


@dataclass(frozen=True)
class BlockCall:
    """Arguments with which the model calls a block, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool
    """Whether the hidden states are passed by name."""

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return the block's output for some hidden states."""
        if self.by_name:
            result = block(*self.args, **{_HIDDEN: hidden}, **self.kwargs)
        else:
            result = block(hidden, *self.args, **self.kwargs)
        return result if isinstance(result, Tensor) else result[0]


@dataclass
class BlockStack:
    """Blocks, the arguments of their calls, and the inputs of the next block for each batch."""

    blocks: Mapping[str, nn.Module]
    calls: Mapping[str, Sequence[BlockCall]]
    hidden: list[Tensor]

    def run(self, name: str) -> Iterator[Tensor]:
        """Yield the outputs of a block for each batch."""
        for call, hidden in zip(self.calls[name], self.hidden, strict=True):
            yield call.run(self.blocks[name], hidden)

    def advance(self, name: str) -> None:
        """Run a block and replace the hidden states by its outputs."""
        for i, outputs in enumerate(self.run(name)):
            self.hidden[i] = outputs

    def record_inputs(
        self, name: str, layers: Iterable[Layer], norms: Mapping[str, nn.Module] | None = None
    ) -> list[SharedInputs]:
        """Run a block and return the inputs of its layers; `norms` are possible sources."""
        recorder = InputRecorder(layers)
        with ExitStack() as hooks:
            for norm_name, norm in (norms or {}).items():
                hooks.callback(norm.register_forward_hook(recorder.norm_hook(norm_name)).remove)
            with recorder:
                for _ in self.run(name):
                    recorder.end_batch()
        return recorder.inputs()

    def compute_hessians(self, name: str, layers: Iterable[Layer]) -> HessianMap:
        """Run a block and return the Hessians of its layers."""
        return map_hessians(self.record_inputs(name, layers))


def map_hessians(inputs: Iterable[SharedInputs]) -> HessianMap:
    """Return Hessians by the matrices that read the inputs."""
    return {reader: each.hessian for each in inputs for reader in each.readers}


def record_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Batch]
) -> BlockStack:
    """Run the model on all batches and record how it calls its blocks.

    If an earlier batch of the same shapes has shown that all blocks are called like the first, the
    model is stopped at its first block.
    """
    recorder = _CallRecorder(next(iter(blocks)), {name: [] for name in blocks})
    with ExitStack() as hooks:
        for name, block in blocks.items():

            def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                recorder.record(name, args, dict(kwargs))

            hooks.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for i, batch in enumerate(batches, start=1):
            try:
                run_model(model, batch)
            except _FirstBlockReached:
                recorder.repeat_first()
            if any(len(calls) != i for calls in recorder.calls.values()):
                raise ConfigError(
                    "a block does not run exactly once per batch; use apply_quantization_config"
                )
            recorder.end_batch()
    return BlockStack(blocks, recorder.calls, recorder.hidden)


class _FirstBlockReached(Exception):  # noqa: N818 - control flow, not an error
    """Stops the model once the calls of all blocks are determined."""


@dataclass
class _CallRecorder:
    """State of `record_calls`."""

    first: str
    calls: dict[str, list[BlockCall]]
    hidden: list[Tensor] = field(default_factory=list)
    uniform_shapes: set[object] = field(default_factory=set)
    """Shapes for which all blocks are called like the first."""

    def record(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call; raise at the first block if the other calls will be the same."""
        by_name = not args
        inputs = kwargs.pop(_HIDDEN) if by_name else args[0]
        self.calls[name].append(BlockCall(args[1:], kwargs, by_name))
        if name == self.first:
            self.hidden.append(inputs)
            if self._last_shapes() in self.uniform_shapes:
                raise _FirstBlockReached

    def repeat_first(self) -> None:
        """Use the last call of the first block for all others."""
        for name, calls in self.calls.items():
            if name != self.first:
                calls.append(self.calls[self.first][-1])

    def end_batch(self) -> None:
        """Remember the shapes of the batch if all blocks were called like the first."""
        last = [calls[-1] for calls in self.calls.values()]
        if all(_has_same_arguments(call, last[0]) for call in last):
            self.uniform_shapes.add(self._last_shapes())

    def _last_shapes(self) -> object:
        call = self.calls[self.first][-1]
        return _describe_shapes((self.hidden[-1], call.args, call.kwargs))


def _has_same_arguments(a: BlockCall, b: BlockCall) -> bool:
    """Return True if two calls have identical objects as arguments."""
    if a.by_name != b.by_name or len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
        return False
    pairs = [*zip(a.args, b.args, strict=True), *((x, b.kwargs[k]) for k, x in a.kwargs.items())]
    return all(x is y for x, y in pairs)


def _describe_shapes(value: object) -> object:
    """Return a hashable description of arguments: shapes, dtypes, plain values and types."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _describe_shapes(item)) for key, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_describe_shapes, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value)


def _count_parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())
