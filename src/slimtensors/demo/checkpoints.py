"""Train for some steps, and keep the whole state as a chain of checkpoints."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from slimtensors.checkpoint import checkpointing, load_checkpoint, points
from slimtensors.demo.llama import Training
from slimtensors.report import Link, links
from slimtensors.spec import as_bytes

_SAVES = 8

OnStep = Callable[[int, int, float], object]
"""Called after each step with its number, how many there are, and the loss."""


@dataclass(frozen=True)
class Chain:
    """A run that was kept, and what that took."""

    links: list[Link]
    save_seconds: float
    """Of one checkpoint."""
    load_seconds: float
    """Of the newest."""
    is_exact: bool
    """Whether the newest is what the training ended with, bit for bit."""

    @property
    def bytes(self) -> int:
        """Of all checkpoints."""
        return sum(link.bytes for link in self.links)

    @property
    def dense_bytes(self) -> int:
        """Of all states in memory."""
        return sum(link.dense_bytes for link in self.links)


def train(
    training: Training, run: Path, lesson: Callable[[int], Tensor], steps: int, on_step: OnStep
) -> Chain:
    """Train, saving eight times on the way, and look at what was saved."""
    saving = 0.0
    every = max(steps // _SAVES, 1)
    parts = (training.model, training.optimizer, training.schedule)
    with checkpointing(run, *parts, every=every, keyframe_every=_SAVES, async_=False) as ckpt:
        for step in range(steps):
            loss = training.step(lesson(step))
            begin = time.perf_counter()
            ckpt.step(loss=loss)
            saving += time.perf_counter() - begin
            on_step(step + 1, steps, loss)
        if steps % every:
            ckpt.save(loss=loss)
    newest = points(run)[-1].path
    begin = time.perf_counter()
    state = load_checkpoint(newest)
    loading = time.perf_counter() - begin
    found = links(run)
    return Chain(found, saving / len(found), loading, _same(training.model, state["model"]))


def _same(model: nn.Module, stored: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == stored.keys() and all(
        torch.equal(as_bytes(x), as_bytes(stored[name])) for name, x in state.items()
    )
