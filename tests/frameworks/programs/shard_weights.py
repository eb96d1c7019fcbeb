"""Shard a model with compressed weights over two processes and compare with the whole model.

torchrun --nproc-per-node=2 shard_weights.py KIND MODE

MODE is fsdp, tensor-parallel, or uneven (FSDP2 of a number of rows that two ranks do not divide).
Rank 0 prints one line of JSON.
"""

import copy
import json
import os
import sys

import torch
from subclasses import KINDS
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from slimtensors.errors import SlimError
from slimtensors.runtime import CompressedTensor, quantize_


def make_model(rows: int) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, rows), nn.ReLU(), nn.Linear(rows, 64, bias=False))
    for parameter in model.parameters():
        parameter.data[torch.rand(parameter.shape) < 0.5] = 0
    return model.bfloat16().eval().requires_grad_(False)


def shard(model: nn.Module, mode: str, mesh: object) -> nn.Module:
    if mode == "tensor-parallel":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh, plan, src_data_rank=None)
    policy = MixedPrecisionPolicy(param_dtype=torch.float32) if mode == "float32" else None
    options = {} if policy is None else {"mp_policy": policy}
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def main(kind: str, mode: str) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (2,))
    model = make_model(67 if mode == "uneven" else 128)
    quantize_(model, KINDS[kind])
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x.float() if mode == "float32" else x
    expected = copy.deepcopy(model).to(x.dtype)(x)
    try:
        sharded = shard(model, mode, mesh)
        results = [sharded(x) for _ in range(3)]
    except SlimError as error:
        return {"error": str(error)}
    local = model[0].weight.to_local()
    return {
        "error": None,
        "largest difference": max(float((r - expected).abs().max()) for r in results),
        "scale": float(expected.abs().max()),
        "dtype": str(results[0].dtype),
        "rows": local.shape[0],
        "compressed": isinstance(local, CompressedTensor),
    }


if __name__ == "__main__":
    dist.init_process_group("gloo")
    report = main(*sys.argv[1:])
    if dist.get_rank() == 0:
        print(json.dumps(report), flush=True)
    dist.barrier()
    os._exit(0)  # an interpreter that ends is aborted by tensors that threads of gloo still hold
