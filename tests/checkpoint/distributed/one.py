"""Example states, saved and loaded by a single process."""

import torch
from torch.distributed import checkpoint as dcp

from slimtensors.checkpoint.distributed import StorageReader, StorageWriter

SINGLE = "ignore:torch.distributed is disabled"


def state(seed=0, rows=1500):
    """Return a state with a tensor of three pieces, moments, and values that are not tensors."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return torch.randn(*shape, generator=g) * scale

    return {
        "model": {
            "wide": normal(rows, 700),
            "bias": normal(7).bfloat16(),
            "scale": torch.tensor(2.5),
        },
        "optim": {
            "state": {
                "wide": {
                    "step": torch.tensor(10.0 + seed),
                    "exp_avg": normal(rows, 700, scale=1e-3),
                    "exp_avg_sq": normal(rows, 700, scale=1e-4).square(),
                }
            },
            "param_groups": [{"params": ["wide"], "lr": 0.1, "betas": (0.9, 0.99)}],
        },
        "step": 10 + seed,
        "rng": (3, (1, 2, 3), None),
        "dtype": torch.bfloat16,
    }


def later(before, seed=1):
    """Return the state after a few more steps."""
    g = torch.Generator().manual_seed(seed)
    after = state(0)
    weight = after["model"]["wide"]
    weight += 1e-4 * torch.randn(weight.shape, generator=g)
    moments = after["optim"]["state"]["wide"]
    moments["step"] += 5
    moments["exp_avg"] *= 0.7
    moments["exp_avg_sq"] *= 0.96
    assert before["model"]["bias"].dtype == after["model"]["bias"].dtype
    return after


def blank(value):
    """Return the state with zeros instead of values."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: blank(part) for key, part in value.items()}
    return [blank(part) for part in value] if type(value) is list else None


def save(value, path, **options):
    dcp.save(value, storage_writer=StorageWriter(path, **options), no_dist=True)


def load(path, like, **options):
    out = blank(like)
    dcp.load(out, storage_reader=StorageReader(path, **options), no_dist=True)
    return out
