"""Compressed weights in several processes."""

import os

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing, nn

from slimtensors.errors import UnsupportedOperationError
from slimtensors.runtime import (
    SparseTensor,
    broadcast_,
    float8_weight_only,
    int4_weight_only,
    quantize_,
)


def model(seed):
    torch.manual_seed(seed)
    generator = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64))
    quantize_(generator, int4_weight_only(group_size=32), lambda module, name: name == "0")
    quantize_(generator, float8_weight_only(), lambda module, name: name == "1")
    return generator


def run(rank, file):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    mine, expected = model(rank), model(0)
    broadcast_(mine)
    wrapped = nn.parallel.DistributedDataParallel(mine)
    assert torch.equal(mine[0].weight, expected[0].weight)
    assert torch.equal(mine[1].weight, expected[1].weight)
    x = torch.full((2, 64), float(rank + 1))
    wrapped(x).sum().backward()
    mean = mine[2].weight.grad
    assert mean is not None
    assert mine[0].weight.grad is None
    dist.barrier()  # nobody leaves while another is still waiting
    os._exit(0)  # an interpreter that ends is aborted by tensors that threads of gloo still hold


@pytest.mark.slow
def test_ddp_trains_around_quantized_weights(tmp_path):
    multiprocessing.spawn(run, (str(tmp_path / "meet"),), nprocs=2)


def test_broadcast_of_sparse_weights_raises():
    sparse = nn.Sequential(nn.Linear(4, 4))
    quantize_(sparse, SparseTensor.from_dense)
    with pytest.raises(UnsupportedOperationError, match=r"0\.weight.*dequantize\(\)"):
        broadcast_(sparse)
