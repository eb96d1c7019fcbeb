"""Load and save a 1 GB bf16 Llama through transformers, one process for each case.

Claims: a `lossless` folder loads in at most 1.10x the memory of the model, in at most the time of a
cold dense load, and in at most twice that of a warm one into memory of its own; 1,155 small tensors
load in at most 1.5x the time; saving takes at most the memory of the model and of its one
compressed shard more, and twice the time.

transformers maps dense files and copies nothing. "mapped" is that, "warm" copies every weight,
which touches as many fresh pages as decoding does; both read every weight once, and so does "cold",
after the kernel was asked to drop the file from its cache (a host that caches the disk of a
virtual machine still has it). System CPU time is the cost of fresh pages: in a virtual machine that
returns free memory to its host, that can be most of it. Weights are normally distributed, whose
exponents compress like those of trained ones.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import transformers
from measure import MB, Report, options, peak_memory
from transformers import AutoModelForCausalLM, LlamaConfig

import slimtensors.transformers as slim

LARGE = {
    "vocab_size": 32000,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 14,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
}
SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 128,
}
"""128 layers of nine tensors and three more: 1,155."""


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where to put the models (default: TMPDIR)")
    parser.add_argument("--repeats", type=int, default=3, help="processes for each case")
    parser.add_argument("--alone", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        what, folder = args.alone
        print(json.dumps(CASES[what](Path(folder))))
        return
    report = Report("transformers_load", quick=args.quick)
    with tempfile.TemporaryDirectory(dir=args.folder) as work:
        for size, config in (("large", LARGE), ("small", SMALL)):
            if size == "large" and args.quick:
                config = config | {"num_hidden_layers": 2}
            run(report, size, make(config, Path(work) / size), args.repeats)
    report.finish()


def make(config: dict[str, int], folder: Path) -> Path:
    """Write a model dense and compressed."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(**config, tie_word_embeddings=False), dtype=torch.bfloat16
    )
    model.save_pretrained(folder / "dense")
    slim.compress_folder(folder / "dense", folder / "lossless", preset="lossless")
    return folder


def run(report: Report, size: str, folder: Path, repeats: int) -> None:
    results: dict[str, list[dict[str, float]]] = {}
    for _ in range(repeats):
        for what in CASES:
            for kind in ("dense", "lossless"):
                found = in_own_process(what, folder / kind)
                results.setdefault(f"{what} {kind}", []).append(found)
    print(f"\n{size}: best of {repeats}")
    print(f"  {'':24}{'s':>8}{'CPU s':>8}{'system':>8}{'peak MB':>9}{'model':>9}")
    best = {}
    for case, found in results.items():
        best[case] = {key: min(one[key] for one in found) for key in found[0]}
        one = best[case]
        print(
            f"  {case:24}{one['seconds']:8.2f}{one['cpu']:8.2f}{one['system']:8.2f}"
            f"{one['peak'] / MB:9.0f}{one['model'] / MB:9.0f}",
            flush=True,
        )
        report.rows.append({"size": size, "case": case, **one})
    claim(report, size, folder, best)


def claim(report: Report, size: str, folder: Path, best: dict[str, dict[str, float]]) -> None:
    def times(what: str, key: str = "seconds") -> float:
        return best[f"{what} lossless"][key] / best[f"{what} dense"][key]

    if size == "small":
        report.at_most("1,155 tensors: time of the dense load", times("warm"), 1.5)
        report.at_most("1,155 tensors: its CPU time", times("warm", "cpu"), 1.5)
        return
    warm, save = best["warm lossless"], best["save lossless"]
    report.at_most("load: memory of the model", warm["peak"] / warm["model"], 1.10)
    report.at_most("load: time of the cold dense load", times("cold"), 1.0)
    report.at_most("load: time of the warm dense load", times("warm"), 2.0)
    report.at_most("load: CPU time of the warm dense load", times("warm", "cpu"), 2.0)
    shard = (folder / "lossless" / "model.safetensors").stat().st_size
    report.at_most("save: memory beside the model, in compressed shards", save["peak"] / shard, 1.0)
    report.at_most("save: time of the dense save", times("save"), 2.0)
    report.at_most("save: CPU time of the dense save", times("save", "cpu"), 2.0)


def in_own_process(what: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--alone", what, str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def load(folder: Path, *, cold: bool = False, copied: bool = False) -> dict[str, float]:
    """Load a model and read all weights."""
    quiet()
    for path in folder.glob("*.safetensors"):
        if cold:
            drop_from_cache(path)
        else:
            path.read_bytes()
    with peak_memory() as risen:
        start = now()
        model = AutoModelForCausalLM.from_pretrained(folder)
        for weight in model.parameters():
            if copied and folder.name == "dense":
                weight.data = weight.data.clone()
            weight.detach().view(torch.int64).sum()
        took = now()
    size = sum(weight.nbytes for weight in model.parameters())
    return {**between(start, took), "peak": risen["peak"], "model": size}


def save(folder: Path) -> dict[str, float]:
    """Save a model from memory, dense or in its own format."""
    quiet()
    model = slim.SparseAutoModelForCausalLM.from_pretrained(folder)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # not the mapped file
    size = sum(weight.nbytes for weight in model.parameters())
    with tempfile.TemporaryDirectory(dir=folder.parent) as target, peak_memory() as risen:
        start = now()
        model.save_pretrained(target, skip_compression_stats=True)
        sync(Path(target))
        took = now()
    return {**between(start, took), "peak": risen["peak"], "model": size}


CASES = {
    "mapped": load,
    "warm": lambda folder: load(folder, copied=True),
    "cold": lambda folder: load(folder, cold=True),
    "save": save,
}


def sync(folder: Path) -> None:
    """Call fsync on the files, as our writer does."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def drop_from_cache(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(2)


def now() -> tuple[float, float, float]:
    times = os.times()
    return time.perf_counter(), times.user + times.system, times.system


def between(start: tuple[float, ...], end: tuple[float, ...]) -> dict[str, float]:
    took = (after - before for before, after in zip(start, end, strict=True))
    return dict(zip(("seconds", "cpu", "system"), took, strict=True))


if __name__ == "__main__":
    main()
