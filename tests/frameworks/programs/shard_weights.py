"""Shard models with compressed weights over two processes, compare them with the whole models.

PYTHONPATH=tests torchrun --nproc-per-node=2 shard_weights.py

Rank 0 prints one line of JSON: reports by mode and kind.
"""

import copy
import json
import os

import torch
from compressed_weights import KINDS, dense_weight
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from slimtensors.errors import UnsupportedOperationError
from slimtensors.runtime import CompressedTensor, quantize_


def make_model(kind, rows):
    model = nn.Sequential(nn.Linear(64, rows), nn.ReLU(), nn.Linear(rows, 64, bias=False))
    model = model.bfloat16().eval().requires_grad_(False)
    model[0].weight.data = dense_weight(rows, 64)
    model[0].bias.data.fill_(1)
    model[2].weight.data = dense_weight(64, rows, seed=1)
    quantize_(model, KINDS[kind], lambda module, name: name == "0" or (name == "2" and rows == 128))
    return model


def shard(model, mode, mesh):
    if mode == "tensor parallel":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        return parallelize_module(model, mesh, plan, src_data_rank=None)
    policy = MixedPrecisionPolicy(torch.float32 if mode == "fsdp as float32" else None)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def run_twice(model, x):
    """Return outputs and gradients of the inputs."""
    results = []
    for _ in range(2):
        inputs = x.clone().requires_grad_()
        output = model(inputs)
        output.sum().backward()
        results += [output.detach(), inputs.grad]
    return results


def compare(kind, mode, mesh):
    model = make_model(kind, 67 if mode == "fsdp of 67 rows" else 128)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    x = x.float() if mode == "fsdp as float32" else x
    dense = model[0].weight.dequantize()
    expected = run_twice(copy.deepcopy(model).to(x.dtype), x)
    try:
        results = run_twice(shard(model, mode, mesh), x)
    except UnsupportedOperationError as error:
        return {"refused": str(error)}
    local, full = model[0].weight.to_local(), model[0].weight.full_tensor()
    return {
        "error": max(
            float((x - y).norm() / y.norm()) for x, y in zip(results, expected, strict=True)
        ),
        "dtype": str(results[0].dtype),
        "rows": local.shape[0],
        "compressed": isinstance(local, CompressedTensor),
        "gathered": torch.equal(full, dense),
    }


MODES = ("fsdp", "fsdp as float32", "fsdp of 67 rows", "tensor parallel")

dist.init_process_group("gloo")
devices = init_device_mesh("cpu", (2,))
report = {mode: {kind: compare(kind, mode, devices) for kind in KINDS} for mode in MODES}
if dist.get_rank() == 0:
    print(json.dumps(report), flush=True)
dist.barrier()
os._exit(0)  # an interpreter that ends is aborted by tensors that threads of gloo still hold
