"""Fit in two processes that Lightning starts itself, with its own files and with the plug-in."""

import json
import logging
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from frameworks.lightning_runs import Model, list_names, make_trainer, weights_of
from lightning.pytorch.callbacks import ModelCheckpoint

from slimtensors.integrations.lightning import SlimCheckpointIO


class Recording(SlimCheckpointIO):
    """Notes which ranks write."""

    def save_checkpoint(self, checkpoint, path, storage_options=None):
        super().save_checkpoint(checkpoint, path, storage_options)
        rank = torch.distributed.get_rank()
        (Path(path).parent / f"rank-{rank}").touch()


def fit(strategy, folder, *, native):
    """Fit, and return the kept names, the ranks that wrote, all temporary files, and weights."""
    tempfile.tempdir = str(folder / "temporary")
    Path(tempfile.tempdir).mkdir(parents=True)
    keep = ModelCheckpoint(folder / "run", monitor="score", save_top_k=1, save_last=True)
    trainer = make_trainer(
        folder,
        native=native,
        plugin=Recording(),
        epochs=3,
        strategy=strategy,
        devices=2,
        callbacks=[keep],
    )
    model = Model()
    trainer.fit(model)
    names = [name for name in list_names(folder / "run") if not name.startswith("rank-")]
    ranks = sorted(path.name for path in (folder / "run").glob("rank-*"))
    files = [path for path in Path(tempfile.tempdir).rglob("*") if path.is_file()]
    left = [path.name for path in files if not path.name.startswith("rank-")]
    best = Path(keep.best_model_path).name
    return {"names": names, "best": best, "left": left}, ranks, weights_of(model)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    strategy, folder = sys.argv[1], Path(sys.argv[2])
    native, _, expected = fit(strategy, folder / "native", native=True)
    ours, ranks, found = fit(strategy, folder / "ours", native=False)
    same = all(torch.equal(x, found[name]) for name, x in expected.items())
    print(json.dumps({"native": native, "ours": ours, "ranks": ranks, "same weights": same}))
