"""A small training run that uses every part of a checkpoint."""

import random
from collections import deque

import numpy as np
import torch
from strategies import same_bits
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR

from slimtensors.checkpoint import build_checkpoint


class Net(nn.Module):
    """A model with an embedding, norms, buffers, dropout and a tied weight."""

    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(50, width)
        self.hidden = nn.Sequential(nn.Linear(width, 64), nn.Dropout(0.1), nn.LayerNorm(64))
        self.norm = nn.BatchNorm1d(64)
        self.back = nn.Linear(64, width)
        self.out = nn.Linear(width, 50, bias=False)
        self.out.weight = self.words.weight

    def forward(self, x):
        return self.out(self.back(self.norm(self.hidden(self.words(x)))))


class Batches:
    """A dataloader with a state."""

    def __init__(self):
        self.at = 0

    def next(self):
        self.at += 1
        noise = random.random() + np.random.rand() + torch.rand(()).item()
        g = torch.Generator().manual_seed(self.at)
        return torch.randint(0, 50, (16,), generator=g), noise

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Run:
    """All objects of a training run."""

    def __init__(self, seed=0, dtype=torch.float32, width=32):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = Net(width)
        for p in self.model.parameters():
            p.data = p.data.to(dtype)
        vectors = [p for p in self.model.parameters() if p.dim() < 2]
        matrices = [p for p in self.model.parameters() if p.dim() > 1]
        self.optimizer = torch.optim.AdamW(
            [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3, eps=1e-4
        )
        self.scheduler = MultiStepLR(self.optimizer, milestones=[10, 25, 25])
        self.scaler = torch.amp.GradScaler("cpu", enabled=dtype is not torch.float16)
        self.batches = Batches()
        self.step = 0

    def parts(self):
        return self.model, self.optimizer, self.scheduler, self.scaler

    def train(self, steps):
        """Return the losses of `steps` steps; they depend on all random number generators."""
        losses = []
        for _ in range(steps):
            x, noise = self.batches.next()
            # In float32: not every CPU supports arithmetic in the other dtypes.
            weights = {name: p.float() for name, p in self.model.named_parameters()}
            y = torch.func.functional_call(self.model, weights, (x,))
            loss = nn.functional.cross_entropy(y, x) * noise
            self.optimizer.zero_grad()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.step += 1
            losses.append(loss.item())
        return losses


def build_state(run, **options):
    """Return the state of a run."""
    return build_checkpoint(*run.parts(), dataloader=run.batches, step=run.step, **options)


def equal_states(a, b):
    """Return True if two nested states are equal in types, values and bits."""
    if isinstance(a, torch.Tensor):
        return same_bits(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal_states(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple | deque):
        lengths = len(a), getattr(a, "maxlen", None)
        return lengths == (len(b), getattr(b, "maxlen", None)) and all(map(equal_states, a, b))
    if isinstance(a, set | frozenset):
        return a == b
    return repr(a) == repr(b)


def copy_state(value):
    """Return a copy of a state that further training does not change."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({k: copy_state(v) for k, v in value.items()})
    if isinstance(value, deque):
        return deque(map(copy_state, value), value.maxlen)
    return [copy_state(v) for v in value] if type(value) is list else value


def find_strides(value, path=""):
    """Return the strides of all tensors of a state by path."""
    if isinstance(value, torch.Tensor):
        return {path: value.stride()}
    if not isinstance(value, dict | list | tuple):
        return {}
    found = {}
    for key, part in value.items() if isinstance(value, dict) else enumerate(value):
        found |= find_strides(part, f"{path}.{key}")
    return found
