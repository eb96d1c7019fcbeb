"""Resume training from a checkpoint of each profile and compare the loss with an exact resume.

    python benchmarks/checkpoint_resume.py gpt FOLDER        # trains first, if FOLDER has no states

Each profile is restored once, and in a second run every ten steps, where biased errors would add
up. The reference is the loss of the exact resume; for scale, there are runs with noise in the last
bit of the weights, and with another order of the batches. `gpt` is in the middle of its training,
with a high learning rate, `gpt-late` near its end, with small batches.
"""

import shutil
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from excp import excp
from measure import Report, options
from training import TASKS, states

from slimtensors.checkpoint import load_checkpoint, save_checkpoint

CASES = {
    "gpt": ("gpt", 1000, 1020),
    "gpt-late": ("gpt", 1280, 1300),
    "minilm": ("minilm", 60, 110),
}
"""Task, step of the base, and step that is restored."""

LIMITS = {"optimizer": 1e-4, "optimizer-bf16": 1e-4, "all": None}
"""Largest difference of the loss from the exact resume; None: that of another batch order."""

ORDERS = (10_000, 20_000, 30_000)
"""First step of the batches in another order."""

State = dict[str, Any]
Change = Callable[[State], State]


class Store:
    """Saves states as deltas from a base, and loads them."""

    def __init__(self, folder: Path, base: State) -> None:
        self._folder = folder
        save_checkpoint(base, folder / "base")

    def through(self, profile: str, sizes: list[int]) -> Change:
        def change(state: State) -> State:
            path = self._folder / "next"
            saved = save_checkpoint(state, path, base=self._folder / "base", profile=profile)
            sizes.append(saved.manifest.bytes)
            back = load_checkpoint(path)
            shutil.rmtree(path)
            return back

        return change


def resumed(name: str, state: State, steps: int, change: Change, times: int = 1, shift: int = 0):
    """Train from a state for some steps; return the training losses and the validation losses."""
    task = TASKS[name]()
    optimizer = task.new_optimizer()
    at, losses, held = state["step"], [], {}
    for start, stop in pairwise(steps * turn // times for turn in range(times + 1)):
        state = change(state)
        task.model.load_state_dict(state["model"])
        # Copies, because the optimizer would train on these tensors.
        optimizer.load_state_dict(deepcopy(state["optimizer"]))
        if start == 0:
            held[start] = task.evaluate()
        losses += task.train(optimizer, at + start, at + stop, shift)
        state = {
            "step": at + stop,
            "model": task.model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
    held[steps] = task.evaluate()
    return losses, held


def noisy(state: State) -> State:
    """Flip the last bit of half of the weights, as a lower bound of noise."""
    random = torch.Generator().manual_seed(0)

    def flipped(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            return x
        last = torch.randint(0, 2, x.shape, generator=random, dtype=torch.int32)
        return (x.contiguous().view(torch.int32) ^ last).view(torch.float32)

    return {**state, "model": {name: flipped(x) for name, x in state["model"].items()}}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("case", choices=CASES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    steps = 20 if chosen.quick else 100
    name = chosen.case
    trained, before, now = CASES[name]
    torch.set_num_threads(1)
    paths = states(trained, chosen.folder)
    base, state = (torch.load(paths[step]) for step in (before, now))
    plain = paths[now].stat().st_size
    report = Report(f"checkpoint_resume-{name}", quick=chosen.quick, timed=False)
    exact, exact_held = resumed(name, state, steps, lambda s: s)

    def compare(what: str, change: Change, sizes: Sequence[int] = (), times: int = 1, shift=0):
        """Train with a change; record and return the difference of the validation loss."""
        losses, held = resumed(name, state, steps, change, times, shift)
        row = {
            "what": what,
            "restores": times,
            "smaller": plain / sizes[0] if sizes else None,
            "held_out": {at: held[at] - exact_held[at] for at in held},
            "curve": [a - b for a, b in zip(losses, exact, strict=True)],
        }
        report.rows.append(row)
        print(line(row), flush=True)
        return abs(row["held_out"][steps])

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), base)
        compare("noise in the last bit of weights", noisy)
        orders = [compare("another order of batches", lambda s: s, shift=at) for at in ORDERS]
        compare("ExCP's recipe", lambda s: excp(base, s))
        for times in (1, 10):
            for profile, limit in LIMITS.items():
                sizes: list[int] = []
                off = compare(profile, store.through(profile, sizes), sizes, times)
                what = f"{profile}, {times} restores: loss off by"
                report.at_most(what, off, max(orders) if limit is None else limit, "")
    report.finish()


def line(row: dict[str, Any]) -> str:
    """Return a row as text."""
    size = f"{row['smaller']:6.2f}x" if row["smaller"] else " " * 7
    out = ", ".join(f"{off:+.5f} after {at}" for at, off in row["held_out"].items())
    training = sum(map(abs, row["curve"])) / len(row["curve"])
    return (
        f"{row['what']:32} {row['restores']:2} restores {size}  held out {out};"
        f" training |d| {training:.5f}"
    )


if __name__ == "__main__":
    main()
