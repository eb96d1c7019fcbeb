"""Size of checkpoints in which averages equal the weights, compared with torch.save + zstd-3.

    python benchmarks/equal_tensors.py

MiniLM with optimizers and averages that start as copies of the weights. zstandard does not find
copies that are farther apart than its window.
"""

import io
import tempfile
from pathlib import Path

import torch
import zstandard
from measure import MB, Report, options
from torch.optim.swa_utils import AveragedModel
from training import minilm

from slimtensors.checkpoint import build_checkpoint, load_checkpoint, save_checkpoint


def peer_bytes(state: object) -> int:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    return len(zstandard.ZstdCompressor(level=3).compress(buffer.getvalue()))


def main() -> None:
    chosen = options(__doc__ or "").parse_args()
    report = Report("equal_tensors", quick=chosen.quick, timed=False)
    task = minilm()
    model = task.model
    weights = {"model": model.state_dict()}

    def stepped(optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.Optimizer:
        for step in range(steps):
            optimizer.zero_grad()
            task.loss(step).backward()
            optimizer.step()
        return optimizer

    with tempfile.TemporaryDirectory() as folder:

        def stored(state: dict, name: str) -> int:
            path = Path(folder) / name
            size = save_checkpoint(state, path).manifest.bytes
            for key, x in load_checkpoint(path)["model"].items():
                assert torch.equal(x, state["model"][key]), key
            return size

        alone = stored(weights, "weights")

        def with_average() -> dict:
            sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
            average = {"average": AveragedModel(model).state_dict()}
            return build_checkpoint(model, sgd, extra=average)

        def with_asgd() -> dict:
            asgd = torch.optim.ASGD(model.parameters(), lr=1e-3)
            return build_checkpoint(model, stepped(asgd, 3))

        cases = {"SGD and an average at its start": with_average, "ASGD, 3 steps": with_asgd}
        for name, build in cases.items():
            state = build()
            size, peer = stored(state, name), peer_bytes(state)
            print(f"  {name}: {size / MB:.1f} MB, torch.save + zstd-3 {peer / MB:.1f} MB")
            report.at_most(f"{name}: of the weights alone", size / alone, 1.02)
            report.at_most(f"{name}: of torch.save + zstd-3", size / peer, 1.0)
    report.finish()


if __name__ == "__main__":
    main()
