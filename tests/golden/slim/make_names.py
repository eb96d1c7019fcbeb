"""Write the golden files with names that differ from those of the base, in version 4.

    python tests/golden/slim/make_names.py tests/golden/slim/4

The files here were made once and are never rewritten. `expected-*` has the values beside them.
"""

import argparse
from pathlib import Path

import torch
from expected import write_expected

import slimtensors


def make(folder: Path) -> None:
    """Write a base and a delta whose names differ from it by a prefix."""
    target = folder / "names"
    target.mkdir(parents=True)
    torch.manual_seed(0)
    base = {
        "bert.encoder.0.weight": torch.randn(20, 32).bfloat16(),
        "bert.encoder.1.weight": torch.randn(20, 32),
        "bert.norm": torch.randn(60),
        "head": torch.randn(9),
    }
    new = {name.removeprefix("bert."): x for name, x in base.items()}
    new["encoder.0.weight"] = (new["encoder.0.weight"].float() * 1.01).bfloat16()
    new["encoder.1.weight"] = new["encoder.1.weight"] + 1e-6
    new["added"] = torch.randn(7)
    slimtensors.save(base, target / "base.safetensors")
    slimtensors.save(new, target / "new.safetensors")
    slimtensors.diff(
        target / "new.safetensors",
        target / "base.safetensors",
        target / "delta.safetensors",
        base_model="owner/name",
        base_revision="v1",
    )
    (target / "new.safetensors").unlink()
    write_expected(new, target / "expected-delta.json")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    make(parser.parse_args().folder)
