"""Save 50 checkpoints during training: two full ones, the others as history.

    python benchmarks/checkpoint_run.py FOLDER        # trains a GPT first, if FOLDER has no states

Everything is saved by `checkpointing(...)` in the background. Sizes are compared with torch.save,
and the time that a save blocks the loop with a plain copy of the state. The GPT continues from step
1000 with its learning rate there, on small batches to save time.
"""

import io
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from measure import MB, Report, options
from training import TASKS, states

from slimtensors.archive.tree import flatten
from slimtensors.checkpoint import build_checkpoint, checkpointing, load_checkpoint
from slimtensors.checkpoint.run import list_checkpoints, verify_run

START = 1000


class Stalls:
    """Times that saves block the loop, and times of copying the state into mapped memory."""

    def __init__(self) -> None:
        self._copies: dict[str, torch.Tensor] = {}
        self.copying: list[float] = []
        self.saving: list[float] = []

    def measure(self, state, save) -> None:
        tensors, _ = flatten(state)
        first = not self._copies
        if first:
            self._copies = {name: x.clone() for name, x in tensors.items()}
        start = time.perf_counter()
        for name, x in tensors.items():
            self._copies[name].copy_(x)
        middle = time.perf_counter()
        save()
        end = time.perf_counter()
        if not first:  # when our memory is new too
            self.copying.append(middle - start)
            self.saving.append(end - middle)


def main() -> None:
    parser = options(__doc__ or "")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--saves", type=int, default=50)
    parser.add_argument("--every", type=int, default=5, help="steps from one save to the next")
    chosen = parser.parse_args()
    saves = 10 if chosen.quick else chosen.saves
    state = torch.load(states("gpt", chosen.folder)[START])
    task = TASKS["gpt-late"]()
    optimizer = task.new_optimizer()
    task.model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    report = Report("checkpoint_run", quick=chosen.quick)
    stalls, at = Stalls(), START
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with checkpointing(
            run, task.model, optimizer, every=1 << 60, keep_last=2, keep_history=True
        ) as ckpt:
            for _ in range(saves):
                task.train(optimizer, at, at + chosen.every)
                at += chosen.every
                ckpt.wait()
                ckpt.step(at)  # counts; what saves is the next line
                stalls.measure(build_checkpoint(task.model, optimizer), ckpt.save)
        last = build_checkpoint(task.model, optimizer, step=at)
        _sizes(report, run, saves, last)
    ratio = min(stalls.saving) / min(stalls.copying)
    print(f"  median stall {statistics.median(stalls.saving) * 1e3:.0f} ms,", end=" ")
    print(f"median copy {statistics.median(stalls.copying) * 1e3:.0f} ms")
    report.at_most("stall of the whole call, times a plain copy", ratio, 1.2)
    report.finish()


def _sizes(report: Report, run: Path, saves: int, last) -> None:
    found = list_checkpoints(run)
    sizes = Counter()
    for point in found:
        kind = f"{point.manifest.profile}, {point.manifest.kind}"
        sizes[kind] += point.manifest.bytes
        print(f"  {point.name:24}{kind:20}{point.manifest.bytes / MB:8.1f} MB")
    buffer = io.BytesIO()
    torch.save({"model": last["model"], "optimizer": last["optimizer"]}, buffer)
    plain = saves * buffer.getbuffer().nbytes
    stored = sum(file.stat().st_size for file in run.rglob("*") if file.is_file())
    report.rows += [{"kind": kind, "bytes": size} for kind, size in sizes.items()]
    print(f"  {len(found)} points of {saves} saves: {stored / MB:.0f} MB,", end=" ")
    print(f"{plain / MB:.0f} MB by torch.save; " + str({k: v // 10**6 for k, v in sizes.items()}))
    report.at_least("the run, smaller than torch.save files", plain / stored, 8)
    assert len(found) == saves, "a save is missing"
    assert verify_run(run), "a point cannot be read"
    newest = load_checkpoint(found[-1].path)
    assert _same(newest, last), "the newest is not the state that was saved"


def _same(a, b) -> bool:
    """Return True if model and optimizer of two states are bitwise equal."""
    parts = [flatten({key: x[key] for key in ("model", "optimizer")})[0] for x in (a, b)]
    return parts[0].keys() == parts[1].keys() and all(
        torch.equal(x.view(torch.uint8), parts[1][name].view(torch.uint8))
        for name, x in parts[0].items()
        if x.dim()
    )


if __name__ == "__main__":
    main()
