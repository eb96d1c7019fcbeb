"""Measure the cost of compressing a folder with one and two processes, and check the cost formula.

    python benchmarks/scale.py

The formula is in docs/distributed.md. Rates are measured with one process and one file, and with
two processes that share one file; predictions for two files are compared with runs. Only the
command line is used, so that start-up, reading, coding, joining and writing are all included.
"""

import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

import slimtensors

GB, MB, MIB = 1e9, 1e6, 1 << 20
IN_FLIGHT = 64 * MIB
"""Bytes of tensors that a process handles at once."""
LARGE, SMALL, COUNT = (49_152, 2048), (2048, 2048), 24


@dataclass(frozen=True)
class Usage:
    """CPU seconds of all processes of a run, and the peak memory of the largest one."""

    cpu: float
    peak: float


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        check(Path(name))


def check(folder: Path) -> None:
    """Measure rates, predict the other runs, print both."""
    one, two = (write_model(folder / f"{count}-files", files=count) for count in (1, 2))
    slimtensors.save({"x": torch.ones(9)}, folder / "nothing", preset="dense", max_shard_size="1MB")
    idle = {ranks: run(folder, "nothing", ranks) for ranks in (1, 2)}
    alone, shared = (run(folder, "1-files", ranks) for ranks in (1, 2))
    stored = slimtensors.inspect(folder / "1-files by 1").stored_bytes

    ratio = stored / one
    make = one / (alone.cpu - idle[1].cpu)
    join = stored / max(shared.cpu - idle[2].cpu - one / make, 1e-3)
    print(f"make {make / GB:.2f} GB/s, join {join / GB:.2f} GB/s per core")
    print(f"stored {ratio:.3f} of the bytes; a process takes {idle[1].peak / MB:.0f} MB\n")

    busy = (1 + ratio) * max(2 * LARGE[0] * LARGE[1], IN_FLIGHT)
    rows = []
    for ranks in (1, 2):
        used = run(folder, "2-files", ranks)
        rows += [
            (f"2 files, {ranks} ranks: CPU s", idle[ranks].cpu + two / make, used.cpu),
            (f"2 files, {ranks} ranks: peak MB", (idle[1].peak + busy) / MB, used.peak / MB),
        ]
    both = slimtensors.inspect(folder / "2-files by 1").stored_bytes
    rows.append(("2 files: MB stored", ratio * two / MB, both / MB))
    print(f"{'':26}{'predicted':>10}{'measured':>10}{'ratio':>7}")
    for title, predicted, measured in rows:
        print(f"{title:26}{predicted:10.2f}{measured:10.2f}{measured / predicted:7.2f}")


def write_model(folder: Path, *, files: int) -> int:
    """Write one file with a large tensor, and a second one with small tensors; return the bytes."""
    random = torch.Generator().manual_seed(0)

    def weight(shape: tuple[int, int]) -> torch.Tensor:
        return (torch.randn(*shape, generator=random) * 0.02).bfloat16()

    parts = [
        {"embed.weight": weight(LARGE)},
        {f"layers.{i}.weight": weight(SMALL) for i in range(COUNT)},
    ][:files]
    homes = {}
    folder.mkdir()
    for i, tensors in enumerate(parts):
        file = f"model-{i + 1:05d}-of-{files:05d}.safetensors"
        save_file(tensors, folder / file)
        homes |= dict.fromkeys(tensors, file)
    index = {"metadata": {}, "weight_map": homes}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return sum(x.nbytes for tensors in parts for x in tensors.values())


def run(folder: Path, model: str, ranks: int) -> Usage:
    """Compress a model in its own process, or with torchrun; one thread per rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command = [sys.executable, *(launcher if ranks > 1 else []), "-m", "slimtensors", "compress"]
    command += [folder / model, "-o", folder / f"{model} by {ranks}", "-T", "1", "-q"]
    measure = [sys.executable, __file__, "--measure", *command]
    done = subprocess.run(list(map(str, measure)), check=True, capture_output=True, text=True)
    return Usage(*json.loads(done.stdout.splitlines()[-1]))


def measure_command(command: list[str]) -> None:
    """Run a command and print the resources that it and its children used."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    print(json.dumps([used.ru_utime + used.ru_stime, 1024.0 * used.ru_maxrss]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure_command(sys.argv[2:])
    else:
        main()
