"""A trainer publishes its weights; another process follows them and predicts with the same bits.

Prints:

    follower at step 3: same bits True
    versions of steps 0, 1, 2, 3; each delta smaller than a hundredth of the model: True
"""

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import nn

from slimtensors.sync import following, publishing

STEPS = 4
TEACHER = torch.Generator().manual_seed(1)


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8)).bfloat16()


def train(store: str, result: Path) -> None:
    """Train a model, publish it after every step, and leave the final weights in a file."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)  # most bf16 weights keep their bits
    with publishing(store, model, keyframe_every=50) as out:
        for step in range(STEPS):
            x = torch.randn(4, 512, generator=TEACHER).bfloat16()
            optimizer.zero_grad()
            (model(x) - x[:, :8]).square().mean().backward()
            optimizer.step()
            out.publish(step)
            out.wait()  # so that this short example drops no version
    torch.save(model.state_dict(), result)


def follow(store: str) -> None:
    """Run the trainer in another process, and follow it until its last step."""
    result = Path(store).with_name("trained.pt")
    trainer = subprocess.Popen([sys.executable, __file__, "train", store, str(result)])
    model, follower = make_model(), following(store)
    step = -1
    while step < STEPS - 1:
        try:
            step = follower.update(model).step
        except FileNotFoundError:  # no version yet
            if trainer.poll():
                raise
        time.sleep(0.05)
    assert trainer.wait() == 0
    trained = torch.load(result)
    same = all(torch.equal(x, trained[name]) for name, x in model.state_dict().items())
    print(f"follower at step {step}: same bits {same}")
    versions = follower.versions()
    size = sum(x.nbytes for x in trained.values())
    small = all(v.delta_bytes < size / 100 for v in versions if v.delta_bytes is not None)
    steps = ", ".join(str(v.step) for v in versions)
    print(f"versions of steps {steps}; each delta smaller than a hundredth of the model: {small}")


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(sys.argv[2], Path(sys.argv[3]))
        return
    with tempfile.TemporaryDirectory() as folder:
        follow(f"{folder}/run")


if __name__ == "__main__":
    main()
