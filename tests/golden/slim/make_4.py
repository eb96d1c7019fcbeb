"""Write the golden files of version 4.

    python tests/golden/slim/make_4.py tests/golden/slim/4

The files here were made once and are never rewritten. Every delta has `expected` values beside it.
"""

import sys
from pathlib import Path

import torch
from expected import write_expected
from torch import Tensor

import slimtensors
from slimtensors.codecs.changes import DTYPES


def make_models() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return a model and its fine-tune: few or many changes of every dtype, and special values."""
    g = torch.Generator().manual_seed(4)
    base, new = {}, {}
    for dtype, name in DTYPES.items():
        for kind, shape, rate in (("few", (36, 40), 2e-6), ("many", (30, 4, 10), 3e-3)):
            weight = 0.05 * torch.randn(shape, generator=g)
            step = (
                rate
                * torch.randn(shape, generator=g)
                * torch.rand(shape[0], *[1] * (len(shape) - 1), generator=g)
            )
            if kind == "few":
                step *= torch.rand(shape, generator=g) < 0.05
            weight.view(-1)[:4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-30])
            base[f"{kind}.{name}"] = weight.to(dtype)
            changed = (weight + step).to(dtype)
            changed.view(-1)[1:4] = torch.tensor([-2.0, 0.0, float("nan")]).to(dtype)
            new[f"{kind}.{name}"] = changed
    base["bias"] = torch.randn(300, generator=g).bfloat16()
    new["bias"] = base["bias"] + (0.1 * torch.randn(300, generator=g)).bfloat16()
    return new, base


def main(folder: Path) -> None:
    """Write what does not exist yet."""
    target = folder / "deltas"
    if target.exists():
        return
    target.mkdir(parents=True)
    new, base = make_models()
    slimtensors.save(base, target / "base.safetensors")
    slimtensors.save(new, target / "new.safetensors")
    slimtensors.diff(
        target / "new.safetensors", target / "base.safetensors", target / "file.safetensors"
    )
    (target / "new.safetensors").unlink()
    write_expected(new, target / "expected-file.json")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
