"""Fixtures: tensors of several kinds, and a file that contains them."""

import pytest
import torch
from archive.made import sparse, two_four

import slimtensors


@pytest.fixture
def tensors():
    return {
        "a.weight": sparse(),
        "b.weight": two_four(),
        "norm": torch.ones(64, dtype=torch.bfloat16),
        "dense": torch.randn(8, 8),
        "0-d": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.empty(0, 7, dtype=torch.int16),
    }


@pytest.fixture
def path(tmp_path):
    return tmp_path / "x.safetensors"


@pytest.fixture
def saved(tensors, path):
    slimtensors.save(tensors, path, preset="sparse")
    return path
