"""Load and save one file: 16 bf16 tensors of 4096 x 4096, half zeros, 512 MiB, in the page cache.

Claim: `slimtensors.load` to dense tensors on two threads takes at most 1.5 times as long as
copying the dense tensors from memory into fresh pages on two threads: `torch.empty` + `copy_` of
each. Stricter copies are shown as well: into fresh huge pages, which `load` uses itself, and from a
safetensors file. `load` also checks a CRC-32C of every byte, which no peer does.

Saving is compared with safetensors' `save_file` of the dense tensors and the peer's
`save_compressed`. Ours calls fsync, theirs do not; both variants are shown.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors import BitmaskConfig, load_compressed, save_compressed
from measure import PEER, Report, interleaved, memory, options, same_bits, sparse, with_threads
from safetensors.torch import load_file, save_file
from torch import Tensor

import slimtensors
from slimtensors.tensor import Spec, allocate

Tensors = dict[str, Tensor]
OURS, COPY = "slimtensors.load, 2 threads", "copy into fresh pages, 2 threads"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="where to put the files (default: TMPDIR)")
    args = parser.parse_args()
    report = Report("load_file", quick=args.quick)
    side = 4096  # malloc reuses memory for smaller blocks
    count, repeats = (2, 3) if args.quick else (16, 9)
    tensors = {
        f"layers.{i}.weight": sparse((side, side), torch.bfloat16, 0.5, seed=i)
        for i in range(count)
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        time_saving(report, tensors, Path(folder), 2 if args.quick else 3)
        time_loading(report, tensors, Path(folder), repeats)
    report.finish()


def time_saving(report: Report, tensors: Tensors, folder: Path, repeats: int) -> None:
    ours, plain, theirs = (folder / name for name in ("ours", "plain", "theirs"))

    def save_plain() -> None:
        save_file(tensors, plain)

    def save_theirs() -> None:
        save_compressed(tensors, theirs, "sparse-bitmask")

    cases = {
        "slimtensors.save, with fsync": lambda: slimtensors.save(tensors, ours, threads=2),
        "slimtensors.save_compressed, with fsync": lambda: slimtensors.save_compressed(
            tensors, folder / "ours-in-their-format", threads=2
        ),
        "safetensors save_file, dense": save_plain,
        "safetensors save_file, dense, then fsync": then_sync(save_plain, plain),
        f"{PEER} save_compressed": save_theirs,
        f"{PEER} save_compressed, then fsync": then_sync(save_theirs, theirs),
    }
    torch.set_num_threads(2)
    timings = interleaved(cases, repeats)
    report.table(
        f"save {describe(tensors)}", timings, size=nbytes(tensors), against=next(iter(cases))
    )
    print(f"  on disk: ours {mib(ours)}, dense {mib(plain)}, {PEER} {mib(theirs)} MiB")


def time_loading(report: Report, tensors: Tensors, folder: Path, repeats: int) -> None:
    ours, plain, theirs = (folder / name for name in ("ours", "plain", "theirs"))
    config = BitmaskConfig(format="sparse-bitmask")

    def load_theirs() -> Tensors:
        return dict(load_compressed(theirs, config))

    for found in (slimtensors.load(ours), slimtensors.load(theirs), load_theirs()):
        assert found.keys() == tensors.keys()
        assert all(same_bits(found[name], tensors[name]) for name in tensors)
    cases = {
        OURS: lambda: slimtensors.load(ours, threads=2),
        "slimtensors.load, 1 thread": lambda: slimtensors.load(ours, threads=1),
        f"slimtensors.load of {PEER}'s file": lambda: slimtensors.load(theirs, threads=2),
        COPY: with_threads(2, lambda: copied(tensors, torch.empty_like)),
        "copy into fresh pages, 1 thread": with_threads(
            1, lambda: copied(tensors, torch.empty_like)
        ),
        "copy into fresh huge pages, 2 threads": with_threads(
            2, lambda: copied(tensors, empty_huge)
        ),
        "safetensors load_file + clone, 2 threads": with_threads(
            2, lambda: {name: x.clone() for name, x in load_file(plain).items()}
        ),
        "slimtensors.load of the dense file, 2 threads": lambda: slimtensors.load(plain, threads=2),
        f"{PEER} load_compressed, 2 threads": with_threads(2, load_theirs),
    }
    timings = interleaved(cases, repeats, slow={list(cases)[-1]: 2 if repeats < 5 else 3})
    report.table(f"load {describe(tensors)}", timings, size=nbytes(tensors), against=OURS)
    best = {case: timing.best for case, timing in timings.items()}
    report.at_most("load to dense against copying into fresh pages", best[OURS] / best[COPY], 1.5)
    print(f"  {memory()['peak'] / 2**20:.0f} MiB at most in this process")


def copied(tensors: Tensors, allocate: Callable[[Tensor], Tensor]) -> Tensors:
    return {name: allocate(x).copy_(x) for name, x in tensors.items()}


def empty_huge(x: Tensor) -> Tensor:
    return allocate(Spec.of(x))


def then_sync(save: Callable[[], None], path: Path) -> Callable[[], None]:
    def run() -> None:
        save()
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)

    return run


def describe(tensors: Tensors) -> str:
    shape = " x ".join(str(n) for n in next(iter(tensors.values())).shape)
    return f"{len(tensors)} bf16 tensors of {shape}, density 50 %"


def nbytes(tensors: Tensors) -> int:
    return sum(x.nbytes for x in tensors.values())


def mib(path: Path) -> int:
    return path.stat().st_size >> 20


if __name__ == "__main__":
    main()
