"""Memory while saving and loading a state dict of 4 GiB, half zeros; one process for each case.

Claim: saving needs at most 256 MB besides the state dict, loading at most 256 MB besides the
result. Counted is the peak resident memory, mapped files included, above what the process had
just before (the interpreter with everything imported; for saving also the state dict).

80 tensors of 32 or 64 MiB and one of 256 MiB, bf16. Peers: safetensors with the dense tensors,
compressed-tensors 0.14.0.1 with its sparse-bitmask format.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors import BitmaskConfig, load_compressed, save_compressed
from measure import MB, PEER, Report, options, peak_memory, sparse
from safetensors.torch import load_file, save_file
from torch import Tensor

import slimtensors

Tensors = dict[str, Tensor]
LIMIT = 256

SAVERS: dict[str, Callable[[Tensors, Path], object]] = {
    "slimtensors": slimtensors.save,
    "slimtensors, compressed-tensors format": slimtensors.save_compressed,
    "safetensors": save_file,
    PEER: lambda tensors, path: save_compressed(tensors, path, "sparse-bitmask"),
}
LOADERS: dict[str, dict[str, Callable[[Path], Tensors]]] = {
    "slimtensors": {"load": slimtensors.load},
    "slimtensors, compressed-tensors format": {"load": slimtensors.load},
    "safetensors": {
        "load_file (the mapped file), all read": lambda path: read(load_file(path)),
        "load_file + clone": lambda path: {k: x.clone() for k, x in load_file(path).items()},
        "slimtensors.load of the dense file": slimtensors.load,
    },
    PEER: {
        "load_compressed": lambda path: dict(
            load_compressed(path, BitmaskConfig(format="sparse-bitmask"))
        )
    },
}


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where to put the files (default: TMPDIR)")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.alone:
        who, how, path = args.alone
        print(json.dumps(alone(who, how, Path(path), quick=args.quick)))
        return
    report = Report("peak_memory", quick=args.quick)
    print(
        "\npeak MB above before, without and with the result; the most anonymous and mapped-file MB"
    )
    print(f"  {'':72}{'besides':>9}{'all':>9}{'anon.':>9}{'file':>9}{'s':>7}")
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        for who, loaders in LOADERS.items():
            path = Path(folder) / "model.safetensors"
            for how in ("save", *loaders):
                measured = in_own_process(who, how, path, quick=args.quick)
                show(report, who, how, measured)
            path.unlink()
    report.finish()


def show(report: Report, who: str, how: str, measured: dict[str, float]) -> None:
    kinds = ("besides", "peak", "anonymous", "file")
    cells = "".join(f"{measured[kind] / MB:9.0f}" for kind in kinds)
    print(f"  {who + ': ' + how:72}{cells}{measured['seconds']:7.1f}", flush=True)
    report.rows.append({"case": f"{who}: {how}", **measured})
    if who == "slimtensors":
        report.at_most(f"{who}: {how}", measured["besides"] / MB, LIMIT, "MB")


def in_own_process(who: str, how: str, path: Path, *, quick: bool) -> dict[str, float]:
    command = [sys.executable, __file__, "--alone", who, how, str(path)]
    done = subprocess.run(
        [*command, "--quick"] if quick else command, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(done.stdout)


def alone(who: str, how: str, path: Path, *, quick: bool) -> dict[str, float]:
    """Save or load in this process, and return the increase of memory and the seconds."""
    torch.set_num_threads(2)
    tensors = state_dict(quick=quick) if how == "save" else {}
    with peak_memory() as risen:
        start = time.perf_counter()
        if how == "save":
            SAVERS[who](tensors, path)
            result = 0
        else:
            tensors = LOADERS[who][how](path)
            result = sum(x.nbytes for x in tensors.values())
        seconds = time.perf_counter() - start
    measured: dict[str, float] = {**risen, "seconds": seconds, "result": result}
    return measured | {"besides": risen["peak"] - result}


def read(tensors: Tensors) -> Tensors:
    """Touch every page, as using the tensors would."""
    for x in tensors.values():
        x.view(torch.int64).sum()
    return tensors


def state_dict(*, quick: bool) -> Tensors:
    """Return 40 layers of two weights, and an embedding: equal values in separate memory."""
    scale = 8 if quick else 1
    template = sparse((8192 // scale, 4096), torch.bfloat16, 0.5)
    half = template[: len(template) // 2]
    tensors = {"embedding.weight": torch.cat([template] * 4)}
    for i in range(40):
        tensors[f"layers.{i}.up.weight"] = template.clone()
        tensors[f"layers.{i}.down.weight"] = half.clone()
    return tensors


if __name__ == "__main__":
    main()
