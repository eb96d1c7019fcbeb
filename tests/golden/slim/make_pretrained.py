"""Write the golden checkpoints that need a pretrained model, version 3.

    python tests/golden/slim/make_pretrained.py tests/golden/slim/3

The files here were made once and are never rewritten. Every checkpoint has `expected` values
beside it.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from expected import write_expected
from make_states import changed, normal

import slimtensors
from slimtensors.checkpoint import load_checkpoint
from slimtensors.checkpoint.manifest import read_manifest, write_manifest
from slimtensors.checkpoint.pretrained import Pretrained
from slimtensors.checkpoint.store import FlatState, SaveOptions, save_state


def make_model() -> dict[str, torch.Tensor]:
    """Return a pretrained model: some tensors stay, others are trained, two are merged."""
    return {
        "frozen": normal(600, 24, 16),
        "short": normal(601, 24, 16).bfloat16(),
        "experts.0": normal(602, 12, 16),
        "experts.1": normal(603, 12, 16),
        "trained": normal(604, 24, 16).bfloat16(),
        "sorted": normal(605, 24, 16),
        "other": normal(606, 5),
    }


def make_state(model: dict[str, torch.Tensor], seed: int) -> dict[str, Any]:
    """Return a state in which parts of the model have changed."""
    weights = {
        "frozen": model["frozen"],
        "short": model["short"].float(),
        "experts": torch.cat([model["experts.0"], model["experts.1"]]),
        "trained": changed(model["trained"], seed, 0.002),
        "sorted": changed(model["sorted"], seed + 2, 0.001),
        "new": normal(seed + 4, 6, 4),
    }
    return {"model": weights, "step": seed}


def write_checkpoints(folder: Path) -> None:
    """Write a model and checkpoints of it: alone, rounded, and with a base."""
    (folder / "model").mkdir(parents=True)
    model = make_model()
    slimtensors.save(model, folder / "model" / "model.safetensors", preset="lossless")
    pretrained = Pretrained(folder / "model", {"experts": ("experts.0", "experts.1")})
    cases = {
        "tuned": SaveOptions(pretrained=pretrained),
        "tuned-all": SaveOptions(pretrained=pretrained, profile="all", stores_all_weights=True),
        "tuned-delta": SaveOptions(folder / "tuned", pretrained=pretrained),
    }
    for i, (name, options) in enumerate(cases.items()):
        save_state(FlatState.of(make_state(model, 700 + 10 * i)), folder / name, options)
        manifest = read_manifest(folder / name)
        assert manifest.pretrained is not None
        place = replace(manifest.pretrained, hints=("model", "/models/model"))
        write_manifest(folder / name, replace(manifest, pretrained=place))
        write_expected(load_checkpoint(folder / name), folder / f"expected-{name}.json")


def main(folder: Path) -> None:
    """Write what does not exist yet."""
    if not (folder / "checkpoints").exists():
        write_checkpoints(folder / "checkpoints")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
