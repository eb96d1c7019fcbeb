"""See how a model calls its blocks."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.quantization.algorithms.blocks import HIDDEN, Batch, Call, Stack, run


class _Reached(Exception):  # noqa: N818 - nothing went wrong
    """Nothing after the first block tells more."""


def record(model: nn.Module, blocks: Mapping[str, nn.Module], batches: Sequence[Batch]) -> Stack:
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
                run(model, batch)
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
