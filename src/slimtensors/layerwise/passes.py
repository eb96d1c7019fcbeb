"""Forward passes of a model, which may pause in the middle.

A pass that pauses runs in a thread of its own, so that any model can be paused in the middle of its
own code, with everything it has computed so far. Only one thread runs at a time: the caller's
thread resumes a pass and waits until it pauses again or ends.
"""

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from slimtensors.errors import ConfigError
from slimtensors.layerwise.inputs import Batch, MatrixTable
from slimtensors.layerwise.products import PRODUCTS, TRANSPARENT

Function = Callable[..., Any]
CallHandler = Callable[[str, Function, tuple[Any, ...], Mapping[str, Any]], Any]
"""Called instead of a block with its name, its forward function, and the arguments."""


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Leave training mode within the context; restore the mode of each module afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:  # not module.train(), which would also affect its children
            module.training = True


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable gradients, dropout, key-value caches and fused experts within the context."""
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    with without_dropout(model), ExitStack() as stack, torch.no_grad():
        for config in _list_configs(model):
            stack.callback(setattr, config, "use_cache", config.use_cache)
            config.use_cache = False
        if experts not in (None, "eager"):
            choose: Callable[[str], None] = model.set_experts_implementation  # type: ignore[assignment]
            choose("eager")
            stack.callback(choose, experts)
        yield


def _list_configs(model: nn.Module) -> list[Any]:
    """Return all configs of a model and its parts that enable a cache."""
    found: dict[int, Any] = {}
    queue = [module.config for module in model.modules() if hasattr(module, "config")]
    seen: set[int] = set()
    while queue:
        config = queue.pop()
        if id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        if getattr(config, "use_cache", None):
            found[id(config)] = config
        queue += [each for each in vars(config).values() if hasattr(each, "to_diff_dict")]
    return list(found.values())


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
class _Product:
    """A product that was computed when a call ran."""

    function: Function
    layers: Set[str]
    """Layers whose weights it reads."""
    result: Tensor | None
    """None if it was not kept."""
    version: int = 0

    def reuse(self) -> Tensor | None:
        """Return the result, unless it was changed in place since."""
        is_unchanged = self.result is not None and self.result._version == self.version
        return self.result if is_unchanged else None


@dataclass
class CacheBudget:
    """Memory for results that several calls may keep, in bytes."""

    left: int

    def take(self, size: int) -> bool:
        """Reserve memory, if enough is left."""
        if size > self.left:
            return False
        self.left -= size
        return True


class ProductCache(TorchFunctionMode):
    """Keeps the products of a call, so that it need not compute them again when it runs again.

    All that a call computes before the first product with a changed weight stays the same. Results
    that do not fit into the budget are computed again.
    """

    def __init__(self, matrices: MatrixTable, budget: CacheBudget) -> None:
        super().__init__()
        self._matrices = matrices
        self._budget = budget
        self._products: list[_Product] = []
        self._position = 0

    def run(self, function: Callable[[], Any]) -> Any:
        """Return the result of a call, which must be the same each time."""
        self._position = 0
        with self:
            return function()

    def remove(self, layers: Set[str]) -> None:
        """Remove all results that depend on layers whose weights were changed."""
        products = enumerate(self._products)
        first = next((i for i, x in products if not x.layers.isdisjoint(layers)), None)
        self._cut(len(self._products) if first is None else first)

    def _cut(self, length: int) -> None:
        self._budget.left += sum(
            product.result.nbytes
            for product in self._products[length:]
            if product.result is not None
        )
        del self._products[length:]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Return the kept result of a product, or call the function."""
        kwargs = kwargs or {}
        if func in TRANSPARENT:
            with self:
                return TRANSPARENT[func](*args, **kwargs)
        if func not in PRODUCTS:
            return func(*args, **kwargs)
        position = self._position
        self._position += 1
        if position < len(self._products):
            if self._products[position].function is not func:
                self._cut(position)
            elif (kept := self._products[position].reuse()) is not None:
                return kept
        result = func(*args, **kwargs)
        if position == len(self._products):
            found = self._matrices.find_products(func, args, kwargs)
            layers = frozenset(name for (name, _), _ in found)
            if isinstance(result, Tensor) and self._budget.take(result.nbytes):
                self._products.append(_Product(func, layers, result, result._version))
            else:
                self._products.append(_Product(func, layers, None))
        return result


@dataclass(frozen=True)
class PausedCall:
    """A call of a function at which a pass has paused."""

    unit: str
    """Name of the block, or of the layer outside of the blocks."""
    function: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    caches: list[ProductCache] = field(default_factory=list)
    """The cache to run it with, if any."""

    def run(self) -> Any:
        """Return the result of the call."""
        return self.run_with(self.args, self.kwargs)

    def run_with(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of the call with copies of its arguments."""
        function = partial(self.function, *args, **kwargs)
        return self.caches[0].run(function) if self.caches else function()


class _PassStopped(BaseException):
    """Unwinds the thread of a pass that is not needed any more."""


class ForwardPass:
    """A function that runs in its own thread and pauses by calling `pause`."""

    def __init__(self, function: Callable[["ForwardPass"], object]) -> None:
        self.call: PausedCall | None = None
        """Call at which it is paused; None before the start and after the end."""
        self._function = function
        self._error: BaseException | None = None
        self._results: SimpleQueue[tuple[bool, Any]] = SimpleQueue()
        self._paused: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Run until the first pause."""
        context, autocast = copy_context(), _list_autocasts()
        threads = torch.get_num_threads()

        def run() -> None:
            with ExitStack() as stack:
                for device, dtype in autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                stack.enter_context(torch.no_grad())
                context.run(self._run)

        self._thread = threading.Thread(target=run, daemon=True, name="slimtensors-pass")
        try:
            self._thread.start()
        except RuntimeError as error:
            self._thread = None
            raise ConfigError(
                f"cannot start a thread for each batch: {error}; use fewer, larger batches"
            ) from error
        self._wait()  # for the thread to limit its number of OpenMP threads
        torch.set_num_threads(threads)
        self.resume(None)

    def resume(self, result: Any) -> None:
        """Continue with the result of the call, until the next pause or the end."""
        self.call = None
        self._results.put((True, result))
        del result
        self._wait()

    def stop(self) -> None:
        """End the pass where it is."""
        self.call = None
        if self._thread is not None and self._thread.is_alive():
            self._results.put((False, None))
            self._thread.join()

    def pause(self, call: PausedCall) -> Any:
        """Pause the pass at a call, and return the result that `resume` passes."""
        self.call = call
        del call
        return self._hand_over()

    def _run(self) -> None:
        # Every thread would start OpenMP threads of its own; blocks run in the caller's thread.
        torch.get_num_threads()  # initializes the setting of this thread, else it is done later
        torch.set_num_threads(1)
        try:
            self._hand_over()
            self._function(self)
        except _PassStopped:
            return
        except BaseException as error:  # raised again in the caller's thread
            self._error = error
        self.call = None
        self._paused.put(None)

    def _hand_over(self) -> Any:
        self._paused.put(None)
        proceed, result = self._results.get()
        if not proceed:
            raise _PassStopped
        return result

    def _wait(self) -> None:
        self._paused.get()
        if self._error is not None:
            raise self._error


@contextmanager
def intercept_calls(blocks: Mapping[str, nn.Module]) -> Iterator[dict[int, CallHandler]]:
    """Replace the forward functions of blocks within the context.

    The context's value maps thread ids to handlers, which the blocks call instead in that thread.
    """
    handlers: dict[int, CallHandler] = {}

    def wrap(name: str, original: Function) -> Function:
        def forward(*args: Any, **kwargs: Any) -> Any:
            handler = handlers.get(threading.get_ident())
            if handler is None:
                return original(*args, **kwargs)
            return handler(name, original, args, kwargs)

        return forward

    with ExitStack() as stack:
        for name, block in blocks.items():
            own = block.__dict__.get("forward")
            original = block.forward
            if own is None:
                stack.callback(delattr, block, "forward")
            else:
                stack.callback(setattr, block, "forward", own)
            block.forward = wrap(name, original)
        yield handlers


def _list_autocasts() -> list[tuple[str, torch.dtype]]:
    """Return the device types for which the calling thread uses autocast, and their dtypes."""
    return [
        (device, torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
        if torch.is_autocast_enabled(device)
    ]
