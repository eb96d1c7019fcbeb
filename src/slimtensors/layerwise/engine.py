"""A model as a stack of blocks that run one by one."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError

Batch = Any
"""What the model is called with: a mapping of arguments, a sequence of them, or just one."""

HIDDEN = "hidden_states"
"""What blocks call what flows through them, where that is given by name."""


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the blocks that a model repeats: its longest list of modules of one class."""
    lists = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len({type(block) for block in module}) == 1
    }
    if not lists:
        raise ConfigError(
            "the model has no list of equal blocks; apply_quantization_config takes any model"
        )
    # Experts may be more than the blocks that hold them, hence the outermost of the lists.
    outer = {n: m for n, m in lists.items() if not any(n.startswith(f"{o}.") for o in lists)}
    name = max(outer, key=lambda n: (len(outer[n]), _size(outer[n])))
    return {f"{name}.{i}": block for i, block in enumerate(outer[name])}


@dataclass(frozen=True)
class Call:
    """How the model calls one block, apart from the hidden states."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    by_name: bool

    def run(self, block: nn.Module, hidden: Tensor) -> Tensor:
        """Return what the block makes of these hidden states."""
        if self.by_name:
            result = block(*self.args, **{HIDDEN: hidden}, **self.kwargs)
        else:
            result = block(hidden, *self.args, **self.kwargs)
        return result if isinstance(result, Tensor) else result[0]


@dataclass
class Stack:
    """Blocks, and for each batch of data how they are called and what goes into the next one."""

    blocks: Mapping[str, nn.Module]
    calls: Mapping[str, Sequence[Call]]
    hidden: list[Tensor]

    def run(self, name: str) -> Iterator[Tensor]:
        """Yield what a block makes of the hidden states of each batch."""
        for call, hidden in zip(self.calls[name], self.hidden, strict=True):
            yield call.run(self.blocks[name], hidden)

    def advance(self, name: str) -> None:
        """Let the hidden states pass through a block, to be what goes into the next one."""
        for i, outputs in enumerate(self.run(name)):
            self.hidden[i] = outputs


@contextmanager
def prepare_batch(model: nn.Module) -> Iterator[None]:
    """Run a model without gradients or dropout, and its experts one by one, as far as it can."""
    training = [module for module in model.modules() if module.training]
    experts = getattr(getattr(model, "config", None), "_experts_implementation", None)
    with ExitStack() as undo, torch.no_grad():
        model.eval()
        for module in training:
            undo.callback(
                setattr, module, "training", True
            )  # train() would also reach its children
        if experts not in (None, "eager"):
            choose: Callable[[str], None] = model.set_experts_implementation  # type: ignore[assignment]
            choose("eager")
            undo.callback(choose, experts)
        yield


def run_block(model: nn.Module, batch: Batch) -> None:
    """Run a model on one batch."""
    options: dict[str, Any] = {}
    if "use_cache" in inspect.signature(model.forward).parameters:
        options["use_cache"] = False  # a block that is run twice must not remember the first time
    if isinstance(batch, Mapping):
        model(**{**batch, **options})
    elif isinstance(batch, Sequence):
        model(*batch, **options)
    else:
        model(batch, **options)


def _size(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


class _Reached(Exception):  # noqa: N818 - nothing went wrong
    """Nothing after the first block tells more."""


def record_calls(
    model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Batch]
) -> Stack:
    """Run the model over all batches, and note how it calls its blocks.

    Where a batch of the same shapes has shown that all blocks are called like the first, the model
    is run no further than to that one.
    """
    seen = _Seen(next(iter(blocks)), {name: [] for name in blocks})
    with ExitStack() as hooks:
        for name, block in blocks.items():

            def hook(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                seen.note(name, args, dict(kwargs))

            hooks.callback(block.register_forward_pre_hook(hook, with_kwargs=True).remove)
        for i, batch in enumerate(batches, start=1):
            try:
                run_block(model, batch)
            except _Reached:
                seen.repeat()
            if any(len(calls) != i for calls in seen.calls.values()):
                raise ConfigError(
                    "a block does not run once for each batch; use apply_quantization_config"
                )
            seen.learn()
    return Stack(blocks, seen.calls, seen.hidden)


@dataclass
class _Seen:
    """What is known so far."""

    first: str
    calls: dict[str, list[Call]]
    hidden: list[Tensor] = field(default_factory=list)
    repeating: set[object] = field(default_factory=set)
    """Shapes for which all blocks are called like the first."""

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take in a call; raise if it is the first, and the others need not be seen."""
        by_name = not args
        inputs = kwargs.pop(HIDDEN) if by_name else args[0]
        self.calls[name].append(Call(args[1:], kwargs, by_name))
        if name == self.first:
            self.hidden.append(inputs)
            if self._shapes() in self.repeating:
                raise _Reached

    def repeat(self) -> None:
        """Let all blocks be called like the first."""
        for name, calls in self.calls.items():
            if name != self.first:
                calls.append(self.calls[self.first][-1])

    def learn(self) -> None:
        """Note whether all blocks were called like the first."""
        last = [calls[-1] for calls in self.calls.values()]
        if all(_is_same(call, last[0]) for call in last):
            self.repeating.add(self._shapes())

    def _shapes(self) -> object:
        call = self.calls[self.first][-1]
        return _shapes((self.hidden[-1], call.args, call.kwargs))


def _is_same(a: Call, b: Call) -> bool:
    """Tell whether two blocks were given the very same objects."""
    if a.by_name != b.by_name or len(a.args) != len(b.args) or a.kwargs.keys() != b.kwargs.keys():
        return False
    pairs = [*zip(a.args, b.args, strict=True), *((x, b.kwargs[k]) for k, x in a.kwargs.items())]
    return all(x is y for x, y in pairs)


def _shapes(value: object) -> object:
    """Return what tells calls of different kinds apart, as on this many tokens or with a mask."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _shapes(each)) for key, each in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(map(_shapes, value))
    return value if isinstance(value, bool | int | float | str | None) else type(value)
