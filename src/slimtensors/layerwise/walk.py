"""Walk through a model in the order of its own forward pass, and pause at each block or layer."""

import copy
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimtensors.layerwise.hessian import HessianMap
from slimtensors.layerwise.inputs import (
    Batch,
    InputRecorder,
    InputsComplete,
    Layer,
    MatrixTable,
    SharedInputs,
)
from slimtensors.layerwise.passes import (
    CacheBudget,
    CallHandler,
    ForwardPass,
    PausedCall,
    ProductCache,
    intercept_calls,
    run_model,
)
from slimtensors.layerwise.products import TRANSPARENT
from slimtensors.layerwise.survey import Survey, iterate_tensors, survey_model
from slimtensors.quantization.layers import list_weights

_LOG = logging.getLogger(__name__)

_MAX_GROUPS = 8
"""Groups of layers that depend on each other, above which a block is divided if possible."""


_CACHE_BYTES = 256 << 20
"""Memory for results that a block would otherwise compute again for each group of its layers; or
as much as the inputs of the block take, if that is more."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks of a model, of all its towers, by name.

    These are the outermost modules of the classes in `_no_split_modules`, as models of
    transformers list them, and elsewhere the items of module lists.
    """
    classes = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", ()) or ()
    }
    modules = {name: each for name, each in model.named_modules() if name}
    candidates = [name for name, each in modules.items() if type(each).__name__ in classes]
    candidates += [
        f"{name}.{key}"
        for name, each in modules.items()
        if isinstance(each, nn.ModuleList)
        for key, _ in each.named_children()
    ]
    found: dict[str, None] = {}
    for name in candidates:
        if not _is_block(modules.get(name)) or any(part in found for part in _parents(name)):
            continue
        if not any(other.startswith(f"{name}.") for other in found):
            found[name] = None
    return {name: each for name, each in modules.items() if name in found}


def _is_block(module: nn.Module | None) -> bool:
    """Return True for a module that can be called and contains layers, but is not one itself."""
    if module is None or list_weights(module) or _has_no_forward(module):
        return False
    return any(list_weights(each) for each in module.modules())


def _has_no_forward(module: nn.Module) -> bool:
    return isinstance(module, nn.ModuleList | nn.ModuleDict)


def _parents(name: str) -> Iterator[str]:
    """Yield the names of the modules that contain a module."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def group_by_block(layers: Mapping[str, Layer], blocks: Iterable[str]) -> dict[str, list[Layer]]:
    """Return the layers of each block that contains any, in the order of the blocks."""
    groups: dict[str, list[Layer]] = {block: [] for block in blocks}
    for name, layer in layers.items():
        for parent in _parents(name):
            if parent in groups:
                groups[parent].append(layer)
    return {block: group for block, group in groups.items() if group}


@dataclass
class Unit:
    """A block, or a layer outside of the blocks, at which all forward passes have paused."""

    name: str
    module: nn.Module | None
    """The block; None for a layer outside of the blocks."""
    groups: list[list[Layer]]
    """The layers to rewrite; each group depends only on the groups before it."""
    calls: list[PausedCall]
    """Its first call in each forward pass."""
    runs: Sequence[Callable[[], object]]
    """Functions that run the whole model on a batch each, if its inputs are not all in one call."""
    survey: Survey

    def run(self) -> Iterator[Any]:
        """Yield the result of a block for each batch."""
        for call in self.calls:
            yield self._replay(call)

    def record_inputs(
        self, layers: Iterable[Layer], norms: Mapping[str, nn.Module] | None = None
    ) -> list[SharedInputs]:
        """Return the inputs of layers; `norms` are possible sources."""
        recorder = InputRecorder(layers)
        with ExitStack() as hooks:
            for norm_name, norm in (norms or {}).items():
                hooks.callback(norm.register_forward_hook(recorder.norm_hook(norm_name)).remove)
            self._run_all(recorder)
        return recorder.inputs()

    def compute_hessians(self, group: Sequence[Layer]) -> HessianMap:
        """Return the Hessians of a group of layers."""
        self._add_caches()
        uses = [self.survey.count_uses(self.name, layer) for layer in group]
        once = not self.runs and all(count == 1 for count in uses)
        share = not self.runs and all(count <= 1 for count in uses)
        recorder = InputRecorder(group, once=once, share=share)
        self._run_all(recorder)
        # From here on, these layers change.
        names = {layer.name for layer in group}
        for call in self.calls:
            for cache in call.caches:
                cache.remove(names)
        return {reader: each.hessian for each in recorder.inputs() for reader in each.readers}

    def _add_caches(self) -> None:
        """Let all calls keep their products, unless these may depend on weights unnoticed."""
        layers = [layer for group in self.groups for layer in group]
        if self.runs or any(layer.name in self.survey.other_uses for layer in layers):
            return
        if len(self.groups) < 2 or any(call.caches for call in self.calls):
            return
        inputs = sum(x.nbytes for call in self.calls for x in iterate_tensors(call.args))
        budget = CacheBudget(max(inputs, _CACHE_BYTES))
        for call in self.calls:
            call.caches.append(ProductCache(MatrixTable(layers), budget))

    def _run_all(self, recorder: InputRecorder) -> None:
        for run in self.runs or [partial(self._replay, call) for call in self.calls]:
            try:
                with recorder:
                    run()
            except InputsComplete:
                pass
            recorder.end_batch()

    def _replay(self, call: PausedCall) -> Any:
        use = self.survey.units.get(self.name)
        clone = use is not None and use.changes_inputs
        args, kwargs = _copy_state((call.args, dict(call.kwargs)), clone=clone)
        return call.run_with(args, kwargs)


@dataclass(frozen=True)
class Walk:
    """The units of a model, and how it uses them."""

    model: nn.Module
    layers: Mapping[str, Layer]
    batches: Sequence[Batch]
    blocks: Mapping[str, nn.Module]
    survey: Survey

    @classmethod
    def plan(
        cls, model: nn.Module, layers: Mapping[str, Layer], batches: Sequence[Batch]
    ) -> "Walk":
        """Run the model once for each kind of batch, and divide it into units."""
        samples = {_describe_batch(batch): batch for batch in sorted(batches, key=_count_items)}
        runs = [partial(run_model, model, batch) for batch in samples.values()]
        blocks = find_blocks(model)
        while True:
            survey = survey_model(model, layers, _map_units(layers, blocks), blocks, runs)
            divided = _divide_blocks(blocks, survey)
            if divided.keys() == blocks.keys():
                return cls(model, layers, batches, blocks, survey)
            blocks = divided

    def find_unobservable(self) -> dict[str, str]:
        """Return the layers whose inputs cannot be recorded, with the reason."""
        return {
            name: f"weight used by {', '.join(sorted(functions))}, whose inputs cannot be observed"
            for name, functions in self.survey.other_uses.items()
            if name not in self.survey.observed
        }

    def iterate_units(self, finished: Iterable[str] = ()) -> Generator[Unit]:
        """Yield the units in the order of their use, except for finished layers.

        Between units, the model runs on from there with its new weights. At any time, memory use
        is the state of one paused forward pass for each batch.
        """
        pending: dict[str, list[Layer]] = {}
        for name, unit_name in _map_units(self.layers, self.blocks).items():
            if name not in finished:
                pending.setdefault(unit_name, []).append(self.layers[name])
        loose = [self.layers[name] for name in pending if name not in self.blocks]
        with intercept_calls(self.blocks) as handlers, ExitStack() as stack:
            passes = [
                ForwardPass(partial(self._run_pass, batch, loose, pending, handlers))
                for batch in self.batches
            ]
            for each in passes:
                stack.callback(each.stop)
                each.start()
            release = _InputRelease(self.survey)
            missed: set[str] = set()
            contributors: dict[str, set[int]] = {}
            while pending:
                for i, each in enumerate(passes):
                    while each.call is not None and each.call.unit not in pending:
                        if i not in contributors.get(each.call.unit, {i}):
                            missed.add(each.call.unit)
                        release.watch(each.call)
                        each.resume(each.call.run())
                        release.free()
                paused = {i: each.call for i, each in enumerate(passes) if each.call is not None}
                if not paused:
                    break
                name = self.survey.choose_first({call.unit for call in paused.values()})
                contributors[name] = {i for i, call in paused.items() if call.unit == name}
                unit = self._make_unit(name, pending[name], [paused[i] for i in contributors[name]])
                del paused
                yield unit
                unit.calls.clear()  # else they would stay in memory while the passes continue
                del pending[name]
            for name in missed:
                _LOG.warning(
                    "%s: some batches use it in another order; their inputs are not used", name
                )

    def _make_unit(self, name: str, layers: Sequence[Layer], calls: list[PausedCall]) -> Unit:
        use = self.survey.units.get(name)
        runs: list[Callable[[], object]] = []
        is_stack = name not in self.blocks and layers[0].count > 1
        if is_stack or (use is not None and not use.runs_once):
            runs = [partial(run_model, self.model, batch) for batch in self.batches]
        groups = self.survey.group_layers(name, layers)
        return Unit(name, self.blocks.get(name), groups, calls, runs, self.survey)

    def _run_pass(
        self,
        batch: Batch,
        loose: Sequence[Layer],
        pending: Mapping[str, object],
        handlers: dict[int, CallHandler],
        forward_pass: ForwardPass,
    ) -> None:
        def pause(unit: str, *call: Any) -> Any:
            return forward_pass.pause(PausedCall(unit, *call))

        handlers[threading.get_ident()] = pause
        with ExitStack() as stack:
            if loose:
                stack.enter_context(_PauseAtProducts(MatrixTable(loose), pending, pause))
            run_model(self.model, batch)


class _InputRelease:
    """Frees inputs of blocks that are not used any more, but that variables still refer to.

    Otherwise each paused pass would keep the embeddings of its batch, from which it started.
    """

    def __init__(self, survey: Survey) -> None:
        self._survey = survey
        self._watched: dict[tuple[str, int], weakref.ref[Tensor]] = {}
        self._is_free: dict[tuple[str, int], bool] = {}

    def watch(self, call: PausedCall) -> None:
        """Remember the inputs of a call after which nothing uses them."""
        use = self._survey.units.get(call.unit)
        if use is None or not use.last_used or not use.runs_once:
            return
        tensors = [*iterate_tensors((call.args, call.kwargs))]
        self._watched = {
            (call.unit, i): weakref.ref(tensors[i]) for i in use.last_used if i < len(tensors)
        }

    def free(self) -> None:
        """Free the inputs that still exist, unless an object other than a variable has them."""
        for key, reference in self._watched.items():
            if (x := reference()) is None or x.is_inference():
                continue
            if key not in self._is_free:
                owners = gc.get_referrers(x)
                self._is_free[key] = all(isinstance(owner, FrameType) for owner in owners)
            if self._is_free[key]:
                x.data = x.new_empty(0)
        self._watched.clear()


class _PauseAtProducts(TorchFunctionMode):
    """Pauses a pass at products with the weights of pending layers outside of the blocks."""

    def __init__(
        self, matrices: MatrixTable, pending: Mapping[str, object], pause: CallHandler
    ) -> None:
        super().__init__()
        self._matrices = matrices
        self._pending = pending
        self._pause = pause

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call the function, after a pause if it is such a product."""
        kwargs = kwargs or {}
        if func in TRANSPARENT:
            with self:
                return TRANSPARENT[func](*args, **kwargs)
        names = [name for (name, _), _ in self._matrices.find_products(func, args, kwargs)]
        if names and names[0] in self._pending:
            return self._pause(names[0], func, args, kwargs)
        return func(*args, **kwargs)


def _map_units(layers: Iterable[str], blocks: Mapping[str, object]) -> dict[str, str]:
    """Return the unit of each layer: its block, or the layer itself."""
    return {name: next((p for p in _parents(name) if p in blocks), name) for name in layers}


def _divide_blocks(blocks: Mapping[str, nn.Module], survey: Survey) -> dict[str, nn.Module]:
    """Replace blocks that are not called as such, or that contain many dependent layers.

    Their inner blocks, if any, take their place.
    """
    result: dict[str, nn.Module] = {}
    for name, block in blocks.items():
        use = survey.units.get(name)
        is_bypassed = use is not None and not use.calls
        inner = {f"{name}.{key}": each for key, each in find_blocks(block).items()}
        if is_bypassed or (inner and survey.count_levels(name) > _MAX_GROUPS):
            result |= inner
        else:
            result[name] = block
    return result


def _describe_batch(value: Any) -> object:
    """Return a hashable description of the kind of a batch: names, dimensions and dtypes."""
    if isinstance(value, Tensor):
        return value.dim(), value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _describe_batch(item)) for key, item in sorted(value.items()))
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_describe_batch, value))
    return type(value)


def _count_items(batch: Batch) -> int:
    return sum(x.numel() for x in iterate_tensors(batch))


def _copy_state(value: Any, *, clone: bool) -> Any:
    """Copy everything in arguments that a call might change; tensors only if `clone` is set."""
    if isinstance(value, Tensor):
        return value.clone() if clone else value
    if type(value) in (tuple, list):
        return type(value)(_copy_state(item, clone=clone) for item in value)
    if type(value) is dict:
        return {key: _copy_state(item, clone=clone) for key, item in value.items()}
    is_state = hasattr(value, "__dict__") and not isinstance(value, nn.Module | type)
    if is_state and not callable(value) and not hasattr(value, "to_diff_dict"):
        return copy.deepcopy(value)  # such as a cache
    return value
