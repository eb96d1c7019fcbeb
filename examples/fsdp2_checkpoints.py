"""Train with FSDP2, save in the background through DCP, and resume after a kill.

    torchrun --nproc-per-node 2 examples/fsdp2_checkpoints.py

It can be killed at any time: started again, it continues from the last complete checkpoint, bit for
bit with the same number of processes. Against plain torch, one line differs: the import of the
storage classes. Without torchrun, it trains in one process.

Prints:

    starting at step 0
    finished at step 40
"""

import os
from pathlib import Path

import torch

# Plain torch:
# from torch.distributed.checkpoint import FileSystemReader as StorageReader
# from torch.distributed.checkpoint import FileSystemWriter as StorageWriter
from slimtensors.distributed import StorageReader, StorageWriter
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CHECKPOINT = Path("checkpoint")
STEPS = int(os.environ.get("STEPS", "40"))
SAVE_EVERY = 10


def make_model():
    """Return a sharded model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def make_batch(step):
    """Return the data of this rank, which depends on the step only."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    return torch.randn(16, 64, generator=generator)


def train():
    """Train from the checkpoint, if there is one."""
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if CHECKPOINT.exists():
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": moments, "step": None}
        dcp.load(state, storage_reader=StorageReader(CHECKPOINT))
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        first = state["step"]
    show(f"starting at step {first}")

    background = dist.new_group(backend="gloo")  # saves and training must not share a group
    saving = None
    for step in range(first, STEPS):
        x = make_batch(step)
        nn.functional.mse_loss(model(x), x.roll(1, dims=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % SAVE_EVERY == 0:
            if saving is not None:
                saving.result()  # one save at a time; raises if it failed
            weights, moments = get_state_dict(model, optimizer)
            state = {"model": weights, "optim": moments, "step": step + 1}
            writer = StorageWriter(CHECKPOINT)  # replaces the previous one when it is complete
            saving = dcp.async_save(state, storage_writer=writer, process_group=background)
    if saving is not None:
        saving.result()
    show(f"finished at step {STEPS}")


def show(text):
    """Print on one rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


if "RANK" in os.environ:  # started by torchrun
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
train()
dist.destroy_process_group()
