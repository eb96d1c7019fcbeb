"""Fit and load with `pytorch_lightning`, without importing `lightning`."""

import json
import sys
import warnings
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slimtensors.integrations.lightning import SlimCheckpointIO, load_from_checkpoint


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    model = Model()
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        default_root_dir=sys.argv[1],
        plugins=[SlimCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4))
    path = trainer.checkpoint_callback.best_model_path
    loaded = load_from_checkpoint(Model, path)
    found = {
        "lightning imported": "lightning" in sys.modules,
        "folder": Path(path).is_dir(),
        "step": trainer.strategy.load_checkpoint(path)["global_step"],
        "same weights": torch.equal(loaded.layer.weight, model.layer.weight),
    }
    print(json.dumps(found))
