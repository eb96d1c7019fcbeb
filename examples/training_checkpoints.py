"""Checkpoint a training run as differences from keyframes, and resume it bit for bit.

Follows trainweights and its to-do list: differences from a reference, a context manager around the
loop, a choice of what may be rounded, bf16.

Prints:

    stopped after 20 steps
    resumed at step 20
    checkpoints: full, delta, full
    resumed and uninterrupted weights are equal: True
    in 8 bits: 3.6 times smaller, largest error below 0.007: True
"""

import torch
from torch import nn

from slimtensors.checkpoint import checkpointing, points, save_checkpoint


def start():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 128))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=30)
    return model, optimizer, scheduler


def step(model, optimizer, scheduler):
    x = torch.randn(32, 128)
    loss = nn.functional.mse_loss(model(x), x.roll(1, dims=1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()


def train(folder, *, until):
    """Train from the newest checkpoint, if any."""
    trained = start()
    with checkpointing(folder, *trained, every=10, keep_last=3) as ckpt:
        first = ckpt.start
        for _ in range(first, until):
            step(*trained)
            ckpt.step()
    return trained[0], first


train("run", until=20)
print("stopped after 20 steps")
model, first = train("run", until=30)
print("resumed at step", first)
print("checkpoints:", ", ".join(point.manifest.kind for point in points("run")))

uninterrupted, _ = train("other-run", until=30)
pairs = zip(model.parameters(), uninterrupted.parameters(), strict=True)
same = all(torch.equal(a, b) for a, b in pairs)
print("resumed and uninterrupted weights are equal:", same)

saved = save_checkpoint({"model": model.state_dict()}, "int8", quantize_i8=True)
dense = sum(x.nbytes for x in model.state_dict().values())
small = max(saved.errors.values()) < 0.007
print(f"in 8 bits: {dense / saved.manifest.bytes:.1f} times smaller, ", end="")
print("largest error below 0.007:", small)
