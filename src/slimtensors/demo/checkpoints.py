"""Train for some steps, and keep the whole state as a chain of checkpoints."""

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor, nn

from slimtensors.checkpoint import checkpointing, load_checkpoint, points
from slimtensors.demo.llama import Training
from slimtensors.report import Link, links
from slimtensors.spec import as_bytes

_SAVES = 8

RUNS = {"exact": "checkpoints", "optimizer": "checkpoints-optimizer"}
"""Profiles by which the state is kept, weights always exactly, and the folders."""

OnStep = Callable[[int, int, float], object]
"""Called after each step with its number, how many there are, and the loss."""


@dataclass(frozen=True)
class Chain:
    """A run that was kept, and what that took."""

    profile: str
    links: list[Link]
    save_seconds: float
    """Of one checkpoint."""
    load_seconds: float
    """Of the newest."""
    is_exact: bool
    """Whether the weights of the newest are what the training ended with, bit for bit."""
    moment_error: float
    """Of the moments of the newest, on average; relative, RMS."""

    @property
    def bytes(self) -> int:
        """Of all checkpoints."""
        return sum(link.bytes for link in self.links)

    @property
    def dense_bytes(self) -> int:
        """Of all states in memory."""
        return sum(link.dense_bytes for link in self.links)


def train(
    training: Training, folder: Path, lesson: Callable[[int], Tensor], steps: int, on_step: OnStep
) -> list[Chain]:
    """Train, saving eight times on the way by each profile, and look at what was saved."""
    every = max(steps // _SAVES, 1)
    parts = (training.model, training.optimizer, training.schedule)
    saving = dict.fromkeys(RUNS, 0.0)
    with ExitStack() as stack:
        loops = {
            profile: stack.enter_context(
                checkpointing(
                    folder / run,
                    *parts,
                    every=every,
                    keyframe_every=_SAVES,
                    profile=profile,
                    async_=False,
                )
            )
            for profile, run in RUNS.items()
        }
        for step in range(steps):
            loss = training.step(lesson(step))
            for profile, ckpt in loops.items():
                begin = time.perf_counter()
                ckpt.step(loss=loss)
                saving[profile] += time.perf_counter() - begin
            on_step(step + 1, steps, loss)
        if steps % every:
            for ckpt in loops.values():
                ckpt.save(loss=loss)
    return [_looked_at(folder, profile, training.model, saving[profile]) for profile in RUNS]


def _looked_at(folder: Path, profile: str, model: nn.Module, saving: float) -> Chain:
    run = folder / RUNS[profile]
    newest = points(run)[-1]
    begin = time.perf_counter()
    state = load_checkpoint(newest.path)
    loading = time.perf_counter() - begin
    found, errors = links(run), newest.manifest.errors.values()
    return Chain(
        profile,
        found,
        saving / len(found),
        loading,
        _same(model, state["model"]),
        fmean(errors) if errors else 0.0,
    )


def _same(model: nn.Module, stored: dict[str, Tensor]) -> bool:
    state = model.state_dict()
    return state.keys() == stored.keys() and all(
        torch.equal(as_bytes(x), as_bytes(stored[name])) for name, x in state.items()
    )
