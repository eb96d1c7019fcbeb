"""Write the golden stores of versions; run ids and file names differ each time."""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from golden.slim.expected import describe

from slimtensors.sync import publishing

TARGET = Path(__file__).parent / "3" / "sync"
SHARDS = Path(__file__).parents[2] / "sync" / "programs" / "shards.py"


def make_state() -> dict[str, torch.Tensor]:
    """Return tensors that are stored in several ways."""
    generator = torch.Generator().manual_seed(22)
    state = {
        "weight": torch.randn(64, 64, generator=generator).bfloat16(),
        "half": torch.randn(60, 20, generator=generator).half(),
        "raw": torch.arange(-40, 40, dtype=torch.int16).view(torch.bfloat16),
        "mask": torch.arange(50) % 3 == 0,
        "step": torch.tensor(0),
        "none": torch.zeros(0, 3),
    }
    return state | {"tied": state["weight"]}


def main() -> None:
    """Write a store of one process and a store of two ranks."""
    state = make_state()
    with publishing(TARGET / "run", state, keyframe_every=9) as out:
        for step in range(3):
            state["weight"].view(torch.int16).view(-1)[step::41] += 1
            state["half"][step] = state["half"][step] * 1.001
            state["step"] += 1
            state["mask"][step] ^= True
            out.publish(step)
            out.wait()
    write("run", state)
    with tempfile.TemporaryDirectory() as folder:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        subprocess.run([*torchrun, "--nproc-per-node=2", str(SHARDS), folder], check=True)
        shutil.copytree(Path(folder) / "run", TARGET / "shards")
        for later in ("v00000005", "v00000006"):  # the same weights again
            shutil.rmtree(TARGET / "shards" / later)
        write("shards", torch.load(Path(folder) / "3.pt"))


def write(name: str, state: dict[str, torch.Tensor]) -> None:
    """Write the state of the newest version of a store."""
    text = json.dumps(describe(state), indent=1)
    (TARGET / f"expected-{name}.json").write_text(f"{text}\n")


main()
