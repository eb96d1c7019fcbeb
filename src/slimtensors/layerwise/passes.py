"""Forward passes of a model, which may pause in the middle.

A pass that pauses runs in a thread of its own, so that any model can be paused in the middle of its
own code, with everything it has computed so far. Only one thread runs at a time: the caller's
thread resumes a pass and waits until it pauses again or ends.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import nn

from slimtensors.errors import ConfigError
from slimtensors.layerwise.inputs import Batch

Function = Callable[..., Any]
CallHandler = Callable[[str, Function, tuple[Any, ...], Mapping[str, Any]], Any]
"""Called instead of a block with its name, its forward function, and the arguments."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Disable gradients, dropout, key-value caches and fused experts within the context."""
    training = [module for module in model.modules() if module.training]
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    with ExitStack() as stack, torch.no_grad():
        model.eval()
        for module in training:  # not module.train(), which would also affect its children
            stack.callback(setattr, module, "training", True)
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
class PausedCall:
    """A call of a function at which a pass has paused."""

    unit: str
    """Name of the block, or of the layer outside of the blocks."""
    function: Function
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def run(self) -> Any:
        """Return the result of the call."""
        return self.function(*self.args, **self.kwargs)


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
