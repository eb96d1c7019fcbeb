"""Schedulers, averaged models and gradient scalers resume, with torch.save as the control."""

import inspect
import io

import pytest
import torch
from checkpoint.optimizer_cases import build_convolutions, compute_loss
from torch.optim import lr_scheduler as torch_schedulers
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn
from training import copy_state, equal_states

from slimtensors.checkpoint import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore")  # of the schedulers


def halve(step):
    return 0.5**step


def in_sequence(optimizer):
    warmup = torch_schedulers.LinearLR(optimizer, total_iters=3)
    decay = torch_schedulers.CosineAnnealingLR(optimizer, 10)
    return torch_schedulers.SequentialLR(optimizer, [warmup, decay], milestones=[3])


def in_a_chain(optimizer):
    first = torch_schedulers.ConstantLR(optimizer, total_iters=3)
    return torch_schedulers.ChainedScheduler(
        [first, torch_schedulers.ExponentialLR(optimizer, 0.9)]
    )


def with_restarts(optimizer):
    from pytorch_optimizer import CosineAnnealingWarmupRestarts

    return CosineAnnealingWarmupRestarts(optimizer, 5)


def with_rex(optimizer):
    from pytorch_optimizer import REXScheduler

    return REXScheduler(optimizer, 12)


SCHEDULERS = {
    "ChainedScheduler": in_a_chain,
    "ConstantLR": torch_schedulers.ConstantLR,
    "CosineAnnealingLR": lambda optimizer: torch_schedulers.CosineAnnealingLR(optimizer, 6),
    "CosineAnnealingWarmRestarts": (
        lambda optimizer: torch_schedulers.CosineAnnealingWarmRestarts(optimizer, 3)
    ),
    "CyclicLR": (
        lambda optimizer: torch_schedulers.CyclicLR(optimizer, 1e-4, 0.1, 3, cycle_momentum=False)
    ),
    "ExponentialLR": lambda optimizer: torch_schedulers.ExponentialLR(optimizer, 0.9),
    "LambdaLR": lambda optimizer: torch_schedulers.LambdaLR(optimizer, halve),
    "LinearLR": torch_schedulers.LinearLR,
    "MultiStepLR": lambda optimizer: torch_schedulers.MultiStepLR(optimizer, [2, 2, 6]),
    "MultiplicativeLR": lambda optimizer: torch_schedulers.MultiplicativeLR(optimizer, halve),
    "OneCycleLR": lambda optimizer: torch_schedulers.OneCycleLR(optimizer, 0.1, 20),
    "PolynomialLR": lambda optimizer: torch_schedulers.PolynomialLR(optimizer, 12, power=2.0),
    "ReduceLROnPlateau": lambda optimizer: torch_schedulers.ReduceLROnPlateau(
        optimizer, patience=1
    ),
    "SequentialLR": in_sequence,
    "StepLR": lambda optimizer: torch_schedulers.StepLR(optimizer, 3),
    "SWALR": lambda optimizer: SWALR(optimizer, 0.1, anneal_epochs=6),
    "CosineAnnealingWarmupRestarts": with_restarts,
    "REXScheduler": with_rex,
}


class Training:
    """A model in a memory format of its own, with a fused optimizer, a scheduler and a scaler."""

    def __init__(self, name, seed):
        torch.manual_seed(seed)
        self.model = build_convolutions().to(memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01, fused=True)
        self.scheduler = SCHEDULERS[name](self.optimizer)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        self.mean = AveragedModel(self.model)
        ema = get_ema_multi_avg_fn(0.9)
        self.moving_mean = AveragedModel(self.model, multi_avg_fn=ema, use_buffers=True)

    def train(self, steps):
        for seed in steps:
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
            self.optimizer.zero_grad()
            loss = compute_loss(self.model, x)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if isinstance(self.scheduler, torch_schedulers.ReduceLROnPlateau):
                self.scheduler.step(loss.item())
            else:
                self.scheduler.step()
            self.mean.update_parameters(self.model)
            self.moving_mean.update_parameters(self.model)

    def build(self):
        means = {"mean": self.mean.state_dict(), "moving_mean": self.moving_mean.state_dict()}
        parts = self.model, self.optimizer, self.scheduler, self.scaler
        return build_checkpoint(*parts, extra=means)

    def restore(self, state):
        restore_checkpoint(state, self.model, self.optimizer, self.scheduler, self.scaler)
        self.mean.load_state_dict(state["mean"])
        self.moving_mean.load_state_dict(state["moving_mean"])

    def restore_by_torch(self, state):
        names = ("model", "optimizer", "scheduler", "scaler", "mean", "moving_mean")
        for name in names:
            getattr(self, name).load_state_dict(state[name])


def check_scheduler(name, folder):
    run = Training(name, 0)
    run.train(range(2))
    save_checkpoint(run.build(), folder / "first")
    run.train(range(2, 5))
    state, file = run.build(), io.BytesIO()
    save_checkpoint(state, folder / "whole")
    save_checkpoint(state, folder / "delta", base=folder / "first")
    torch.save(state, file)
    file.seek(0)
    saved = copy_state(state)
    run.train(range(5, 10))
    result = run.build()
    for kind in ("whole", "delta", "torch"):
        other = Training(name, 1)
        if kind == "torch":
            other.restore_by_torch(torch.load(file, weights_only=False))
        else:
            other.restore(load_checkpoint(folder / kind))
            assert equal_states(other.build(), saved), kind
        other.train(range(5, 10))
        found = other.build()
        assert equal_states(found | {"rng": None}, result | {"rng": None}), kind


@pytest.mark.parametrize("name", ["SequentialLR", "OneCycleLR"])
def test_a_scheduler_resumes_bit_for_bit(tmp_path, name):
    check_scheduler(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_resumes_bit_for_bit(tmp_path, name):
    check_scheduler(name, tmp_path)


def test_no_scheduler_of_torch_is_left_out():
    found = inspect.getmembers(torch_schedulers, inspect.isclass)
    base = torch_schedulers.LRScheduler
    names = {name for name, cls in found if issubclass(cls, base) and not issubclass(base, cls)}
    assert names - {"_LRScheduler"} <= SCHEDULERS.keys()
