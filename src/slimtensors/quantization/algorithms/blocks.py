"""A model as a stack of blocks that can be run one by one."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
def ready(model: nn.Module) -> Iterator[None]:
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


def run(model: nn.Module, batch: Batch) -> None:
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
