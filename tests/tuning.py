"""A small run that trains only the last layer of a pretrained model."""

from pathlib import Path

import torch
from torch import nn
from training import copy_state

import slimtensors
from slimtensors.checkpoint import build_checkpoint


class Tuning:
    """A small model of which only the last layer is trained."""

    def __init__(self, dtype=torch.float32, width=64):
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Embedding(50, width), *(nn.Linear(width, width) for _ in range(8))
        ).to(dtype)
        self.model.requires_grad_(False)[-1].requires_grad_(True)
        self.optimizer = torch.optim.AdamW(self.model[-1].parameters(), lr=1e-3)

    def train(self, steps=1):
        for _ in range(steps):
            loss = self.model(torch.randint(0, 50, (8,))).float().square().mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    def state(self, step=None):
        return copy_state(build_checkpoint(self.model, self.optimizer, step=step))


def save_model(model, folder, *, prefix="", **options):
    """Write the weights of a model like a pretrained one."""
    Path(folder).mkdir()
    weights = {f"{prefix}{name}": x for name, x in model.state_dict().items()}
    target = folder if "max_shard_size" in options else folder / "model.safetensors"
    slimtensors.save(weights, target, **options)
    return folder
