"""Does training notice? Restore a checkpoint of each profile and go on, beside the exact one.

    python benchmarks/checkpoint_resume.py gpt FOLDER        # trains first, if FOLDER has no states

Each profile is restored once, and then once every ten steps of a run: errors with a direction would
add up. The loss of the exact resume is the measure; the yardsticks are noise in the last bit of the
weights, and another order of the batches. Each result is
printed and stored as soon as it is there.
"""

import json
import shutil
import tempfile
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from excp import excp
from measure import RESULTS, options
from training import SAVES, TASKS, states

from slimtensors.checkpoint import load_checkpoint, save_checkpoint

BASES = {"gpt": (0, 2), "minilm": (0, 4)}
"""Which of the states is the base, and which one is restored: 20 and 50 steps later."""

State = dict[str, Any]
Change = Callable[[State], State]


class Store:
    """Sends states to disk as differences from a base, and back."""

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
    """Go on from a state for some steps; return the losses, and those held out on the way."""
    task = TASKS[name]()
    optimizer = task.new_optimizer()
    at, losses, held = state["step"], [], {}
    length = steps // times
    for turn in range(times):
        state = change(state)
        task.model.load_state_dict(state["model"])
        optimizer.load_state_dict(deepcopy(state["optimizer"]))  # it would train on these tensors
        if turn == 0:
            held[0] = task.evaluate()
        for part in (length // 2, length - length // 2) if times == 1 else (length,):
            losses += task.train(optimizer, at, at + part, shift)
            at += part
            held[len(losses)] = task.evaluate()
        state = {
            "step": at,
            "model": task.model.state_dict(),
            "optimizer": optimizer.state_dict(),
        }
    return losses, held


def noisy(state: State) -> State:
    """Flip the last bit of half of the weights: what no training can be proof against."""
    random = torch.Generator().manual_seed(0)

    def flipped(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.float32:
            return x
        last = torch.randint(0, 2, x.shape, generator=random, dtype=torch.int32)
        return (x.contiguous().view(torch.int32) ^ last).view(torch.float32)

    return {**state, "model": {name: flipped(x) for name, x in state["model"].items()}}


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("model", choices=SAVES)
    parser.add_argument("folder", type=Path)
    chosen = parser.parse_args()
    name, steps = chosen.model, 20 if chosen.quick else 100
    torch.set_num_threads(1)
    paths = states(name, chosen.folder)
    base, state = (torch.load(list(paths.values())[i]) for i in BASES[name])
    plain = list(paths.values())[BASES[name][1]].stat().st_size
    exact, exact_held = resumed(name, state, steps, lambda s: s)
    rows = []

    def report(what: str, change: Change, sizes: list[int], times: int = 1, shift: int = 0):
        losses, held = resumed(name, state, steps, change, times, shift)
        differences = [abs(a - b) for a, b in zip(losses, exact, strict=True)]
        last = max(held)
        row = {
            "what": what,
            "restores": times,
            "smaller": plain / sizes[0] if sizes else None,
            "held_out": {at: held[at] - exact_held[at] for at in held if at in exact_held},
            "end": held[last] - exact_held[last],
            "training": sum(differences) / len(differences),
        }
        rows.append(row)
        size = f"{row['smaller']:6.2f}x" if sizes else " " * 7
        print(
            f"{what:28} {times:2} restores {size}  held out {row['held_out'][0]:+.5f} at once,"
            f" {row['end']:+.5f} after {last}; training |d| {row['training']:.5f}",
            flush=True,
        )
        RESULTS.mkdir(exist_ok=True)
        target = RESULTS / f"checkpoint_resume-{name}.json"
        target.write_text(json.dumps({"exact": exact_held, "rows": rows}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        store = Store(Path(folder), base)
        for times in (1, 10):
            for profile in ("optimizer-bf16", "optimizer", "all"):
                sizes: list[int] = []
                report(profile, store.through(profile, sizes), sizes, times)
            if times == 1:
                report("noise in the last bit of weights", noisy, [])
                report("another order of batches", lambda s: s, [], shift=10_000)
                report("ExCP's recipe", lambda s: excp(base, s), [])


if __name__ == "__main__":
    main()
