"""Tensors for tests."""

import torch


def sparse(rows=64, columns=64, keep=0.1, dtype=torch.float32, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g)
    return torch.where(torch.rand(rows, columns, generator=g) < keep, x, 0.0).to(dtype)


def two_four(rows=64, columns=64):
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    x.view(-1, 4)[:, ::2] = 0
    return x


def stored(summary, name):
    return next(t for t in summary.tensors if t.name == name)
