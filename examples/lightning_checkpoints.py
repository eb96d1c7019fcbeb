"""Fit with Lightning, early stopping and the best model; stop, and resume bit for bit.

The only change to the script is `plugins=[SlimCheckpointIO()]`.

Prints:

    stopped early after 6 epochs
    kept: epoch=3.ckpt, last.ckpt
    best model loaded, loss as in training: True
    resumed after 2 epochs, weights as without the interruption: True
"""

import logging
import warnings
from pathlib import Path

import torch
from lightning import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slimtensors.integrations.lightning import SlimCheckpointIO, load_from_checkpoint

logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", module="lightning")


class Classifier(LightningModule):
    def __init__(self, width=256, rate=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.GELU(), nn.Linear(width, 4))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch, index):
        self.log("loss", nn.functional.cross_entropy(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.hparams.rate)


def make_data(seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(64, 16, generator=generator)
    labels = inputs[:, :4].argmax(dim=1)
    return DataLoader(TensorDataset(inputs, labels), batch_size=16)


def fit(folder, *, epochs, resume=None):
    seed_everything(0, verbose=False)
    model = Classifier()
    stop = EarlyStopping("loss", patience=2)
    best = ModelCheckpoint(folder, filename="{epoch}", monitor="loss", save_last=True)
    trainer = Trainer(
        max_epochs=epochs,
        callbacks=[stop, best],
        plugins=[SlimCheckpointIO()],  # the one change
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, make_data(1), make_data(2), ckpt_path=resume)
    return trainer, model, best


trainer, model, best = fit("run", epochs=20)
print("stopped early after", trainer.current_epoch, "epochs")
print("kept:", ", ".join(sorted(path.name for path in Path("run").glob("*.ckpt"))))

loaded = load_from_checkpoint(Classifier, best.best_model_path)
[score] = trainer.validate(loaded, make_data(2), verbose=False)
print("best model loaded, loss as in training:", score["loss"] == best.best_model_score.item())

fit("other-run", epochs=2)
_, resumed, _ = fit("other-run", epochs=20, resume="other-run/last.ckpt")
pairs = zip(resumed.parameters(), model.parameters(), strict=True)
same = all(torch.equal(a, b) for a, b in pairs)
print("resumed after 2 epochs, weights as without the interruption:", same)
