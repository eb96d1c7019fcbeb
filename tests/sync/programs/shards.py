"""Two ranks publish shards of one model, and each version in whole as a reference."""

import os
import sys
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from slimtensors.errors import InUseError, RankError
from slimtensors.sync import publishing

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(31, 17), nn.LayerNorm(17), nn.Linear(17, 1))
mesh = init_device_mesh("cpu", (2,))
fully_shard(model, mesh=mesh)
state = dict(model.state_dict())
state["columns"] = distribute_tensor(torch.randn(6, 9).bfloat16(), mesh, [Shard(1)])
state["copies"] = distribute_tensor(torch.randn(5, 4), mesh, [Replicate()])
state["plain"] = torch.randn(12)
with publishing(folder / "run", state, keyframe_every=3, keep=4) as out:
    for step in range(4):
        for x in state.values():
            local = x.to_local() if isinstance(x, DTensor) else x
            local.view(-1)[step : step + 2] += 1
        out.publish(step)
        published = out.wait()
        assert published.version.step == step
        whole = {k: x.full_tensor() if isinstance(x, DTensor) else x for k, x in state.items()}
        if rank == 0:
            torch.save({k: x.detach() for k, x in whole.items()}, folder / f"{step}.pt")
    out.publish(4)
    out.publish(5)  # each rank agrees on whether the first one is still being written
try:
    with publishing(folder / "run", state) as first, publishing(folder / "run", state):
        pass
except (InUseError, RankError) as error:
    (folder / f"refused-{rank}").write_text(type(error).__name__)
dist.barrier()
os._exit(0)  # threads of gloo may hold tensors
