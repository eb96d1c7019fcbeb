"""Load 2,000 small tensors: the overhead of opening a file and creating tensors.

Claim: `slimtensors.load` takes at most 1.3 times as long as safetensors' `load_file`, whether the
tensors are stored plain or sparse. `load_file` returns views of the mapped file; `load` returns
copies and verifies checksums, so `load_file` + `clone` is shown as well.
"""

import tempfile
from pathlib import Path

import torch
from measure import Report, interleaved, options, same_bits, sparse
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import slimtensors

THEIRS = "safetensors load_file"


def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    report = Report("many_tensors", quick=args.quick)
    count, repeats = (200, 5) if args.quick else (2000, 41)
    with tempfile.TemporaryDirectory() as folder:
        for side in (16, 64):
            for density in (1.0, 0.1):
                tensors = {
                    f"model.layers.{i}.weight": sparse((side, side), torch.float32, density, seed=i)
                    for i in range(count)
                }
                run(report, tensors, density, Path(folder), repeats)
    report.finish()


def run(
    report: Report, tensors: dict[str, Tensor], density: float, folder: Path, repeats: int
) -> None:
    """Time one kind of tensors and check its claims."""
    kind = "plain" if density == 1 else f"sparse, density {density:.0%}"
    shape = " x ".join(str(n) for n in next(iter(tensors.values())).shape)
    title = f"{len(tensors)} fp32 tensors of {shape}, {kind}"
    ours, dense = folder / "ours", folder / "dense"
    slimtensors.save(tensors, ours, preset="sparse")
    save_file(tensors, dense)
    loaded = slimtensors.load(ours)
    assert all(same_bits(loaded[name], x) for name, x in tensors.items())
    stored = {tensor.codec for tensor in slimtensors.inspect(ours).tensors}
    assert stored == ({"plain"} if density == 1 else {"bitmask"}), stored
    cases = {
        "slimtensors.load": lambda: slimtensors.load(ours),
        THEIRS: lambda: load_file(dense),
        "safetensors load_file + clone": lambda: {
            name: x.clone() for name, x in load_file(dense).items()
        },
        "slimtensors.load of the dense file": lambda: slimtensors.load(dense),
        "slimtensors.open": lambda: slimtensors.open(ours),
        "safetensors safe_open": lambda: safe_open(dense, "pt"),
    }
    timings = interleaved(cases, repeats)
    report.table(title, timings, against=THEIRS)
    best = {case: timing.best for case, timing in timings.items()}
    report.at_most(f"{title}: open + load", best["slimtensors.load"] / best[THEIRS], 1.3)


if __name__ == "__main__":
    main()
