"""A small Lightning training, run with and without the plug-in."""

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from strategies import same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slimtensors.integrations.lightning import SlimCheckpointIO


class Model(LightningModule):
    def __init__(self, width=16, rate=1e-2, batch_size=8, **others):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(8, width), nn.GELU(), nn.Linear(width, 4))
        self.batch_size, self.rate = batch_size, rate

    def training_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val", loss)
        # Improves and gets worse again, so that a best checkpoint is not the last one.
        self.log("score", [3.0, 1.0, 2.0, 0.5, 4.0, 0.6][self.trainer.current_epoch % 6])

    test_step = validation_step

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    def _batches(self):
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(32, 8, generator=generator)
        labels = torch.randint(0, 4, (32,), generator=generator)
        return DataLoader(TensorDataset(inputs, labels), batch_size=self.batch_size)

    def train_dataloader(self):
        return self._batches()

    def val_dataloader(self):
        return self._batches()

    def test_dataloader(self):
        return self._batches()


def make_model(**options):
    seed_everything(5, verbose=False)
    return Model(**options)


def make_trainer(root, *, native=False, plugin=None, epochs=6, **options):
    """Return a Trainer with Lightning's own files or with the plug-in."""
    seed_everything(3, verbose=False)
    plugins = [] if native else [plugin or SlimCheckpointIO()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        default_root_dir=root,
        plugins=plugins,
        **{**quiet, **options},
    )


def weights_of(model):
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


def equal_weights(a, b):
    return a.keys() == b.keys() and all(same_bits(x, b[name]) for name, x in a.items())


def list_names(folder):
    """Return the visible names in a folder, except bases of deltas."""
    names = (path.name for path in folder.iterdir())
    return sorted(name for name in names if not name.startswith((".", "base-")))
