"""Every optimizer class of torch and pytorch_optimizer: how to build it and how to take a step.

The packages are imported on first use: all workers of pytest import this file.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import nn


def build_convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.GELU(),
        nn.Conv2d(8, 6, 1),
        nn.GELU(),
        nn.Conv2d(6, 4, 3),
        nn.Flatten(),
        nn.Linear(16, 4),
    )


def build_matrices():
    return nn.Sequential(
        nn.Flatten(), nn.Linear(108, 8, bias=False), nn.GELU(), nn.Linear(8, 4, bias=False)
    )


class Words(nn.Embedding):
    """An embedding with sparse gradients, whose indices are made of floats."""

    def forward(self, x):
        return super().forward((3 * x.float().abs()).long().flatten(1).clamp(0, 31))


def build_words():
    return nn.Sequential(Words(32, 8, sparse=True))


def take_step(model, optimizer, x, *, create_graph=False):
    """Take a step; the closure returns the loss that is already computed."""
    optimizer.zero_grad()
    loss = compute_loss(model, x)
    loss.backward(create_graph=create_graph)
    optimizer.step(lambda: loss)


def step_with_closure(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = compute_loss(model, x)
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)


def step_while_training(model, optimizer, x):
    optimizer.train()
    take_step(model, optimizer, x)


def step_with_fused_backward(model, optimizer, x):
    optimizer.fused_backward(compute_loss(model, x), lr=0.01)


def step_with_two_losses(model, optimizer, x):
    optimizer.zero_grad()
    y = model(x).float()
    optimizer.pc_backward([y.square().mean(), y.mean()])
    optimizer.step()


def step_with_criterion(model, optimizer, x):
    def criterion(y, target):
        return (y.float() - target).square().mean()

    optimizer.set_closure(criterion, x, torch.zeros(4, 4))
    optimizer.step()


def step_in_process_group(model, optimizer, x):
    with process_group():
        take_step(model, optimizer, x)


@contextmanager
def process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group()


def compute_loss(model, x):
    y = model(x).float()
    return y.square().mean() + y.mean()


@dataclass(frozen=True)
class Case:
    """One way to train."""

    make: Callable[[nn.Module], object]
    build: Callable[[], nn.Module] = build_convolutions
    step: Callable[..., object] = take_step

    def start(self, seed, dtype, memory_format):
        """Return a new model and its optimizer."""
        torch.manual_seed(seed)
        model = self.build().to(dtype)
        if self.build is build_convolutions:
            model = model.to(memory_format=memory_format)
        elif memory_format is torch.channels_last:
            for p in model.parameters():  # the same for matrices
                p.data = p.data.t().contiguous().t()
        return model, self.make(model)

    def train(self, model, optimizer, steps):
        """Take steps, each with a batch of its own."""
        p = next(model.parameters())
        for seed in steps:
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
            if not p.is_contiguous():
                x = x.to(memory_format=torch.channels_last)
            self.step(model, optimizer, x.to(p.dtype))


def make_plain(cls, model, **options):
    return cls(model.parameters(), **options)


def make_from_model(cls, model):
    return cls(model)


def make_wrapper(cls, model):
    return cls(torch.optim.AdamW(model.parameters(), lr=0.01))


def make_two_steps(cls, model):
    return cls(model.parameters(), torch.optim.AdamW, lr=0.01)


def make_muon(cls, model):
    matrices, vectors = [], []
    for p in model.parameters():
        (matrices if p.dim() > 1 else vectors).append(p)
    return cls([{"params": matrices, "use_muon": True}, {"params": vectors, "use_muon": False}])


def make_gsam(cls, model):
    import pytorch_optimizer

    base = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = pytorch_optimizer.CosineScheduler(base, t_max=20, max_lr=0.01)
    rho = pytorch_optimizer.ProportionScheduler(schedule, max_lr=0.01)
    return cls(model.parameters(), base, model, rho)


def make_transformers_adafactor(model):
    from transformers.optimization import Adafactor

    return Adafactor(model.parameters())


def make_wsam(cls, model):
    return cls(model, model.parameters(), torch.optim.AdamW, lr=0.01)


def make_in_process_group(cls, model):
    with process_group():
        return make_muon(cls, model)


_MAKERS = {
    **dict.fromkeys(("AdaLOMO", "AdamMini", "LOMO"), make_from_model),
    **dict.fromkeys(("Lookahead", "Magma", "OrthoGrad", "PCGrad", "TRAC"), make_wrapper),
    **dict.fromkeys(("SafeFP16Optimizer", "ScheduleFreeWrapper"), make_wrapper),
    **dict.fromkeys(("FriendlySAM", "LookSAM", "SAM"), make_two_steps),
    **dict.fromkeys(("AdaGO", "AdaMuon"), make_muon),
    **dict.fromkeys(("Muon", "MuonClip", "NorMuon"), make_muon),
    "BSAM": partial(make_plain, lr=1e-4, num_data=1000),
    "DistributedMuon": make_in_process_group,
    "GSAM": make_gsam,
    "Ranger21": partial(make_plain, num_iterations=20),
    "WSAM": make_wsam,
}
_STEPS = {
    **dict.fromkeys(("AdaHessian", "SophiaH"), partial(take_step, create_graph=True)),
    **dict.fromkeys(("BSAM", "FriendlySAM", "LBFGS", "LookSAM", "SAM", "WSAM"), step_with_closure),
    **dict.fromkeys(("AdaLOMO", "LOMO"), step_with_fused_backward),
    **dict.fromkeys(("ScheduleFreeAdamW", "ScheduleFreeRAdam"), step_while_training),
    **dict.fromkeys(("ScheduleFreeSGD", "ScheduleFreeWrapper"), step_while_training),
    "DistributedMuon": step_in_process_group,
    "GSAM": step_with_criterion,
    "PCGrad": step_with_two_losses,
}
_BUILDERS = {
    "torch.Muon": build_matrices,
    "torch.SparseAdam": build_words,
    "pytorch_optimizer.AdaLOMO": build_matrices,
    "pytorch_optimizer.SpectralSphere": build_matrices,
}
_VARIANTS = {
    "torch.Adagrad(fused)": partial(make_plain, torch.optim.Adagrad, lr=0.01, fused=True),
    "torch.Adam(amsgrad)": partial(make_plain, torch.optim.Adam, lr=0.01, amsgrad=True),
    "torch.AdamW(foreach)": partial(make_plain, torch.optim.AdamW, lr=0.01, foreach=True),
    "torch.AdamW(fused)": partial(make_plain, torch.optim.AdamW, lr=0.01, fused=True),
    "torch.RMSprop(centered)": partial(
        make_plain, torch.optim.RMSprop, centered=True, momentum=0.9
    ),
    "torch.SGD(fused)": partial(make_plain, torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "torch.SGD(momentum)": partial(make_plain, torch.optim.SGD, lr=0.01, momentum=0.9),
    "transformers.Adafactor": make_transformers_adafactor,
}


def list_classes() -> dict[str, type]:
    """Return the optimizer classes of both packages by name."""
    import pytorch_optimizer

    names: dict[type, str] = {}
    for package, module in (("torch", torch.optim), ("pytorch_optimizer", pytorch_optimizer)):
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, torch.optim.Optimizer) and cls is not torch.optim.Optimizer:
                names.setdefault(cls, f"{package}.{name}")  # some of torch's are exported again
    return {name: cls for cls, name in names.items()}


@cache
def list_cases() -> dict[str, Case]:
    """Return all cases by name: the classes, and classes with other options."""
    cases = {}
    for name, cls in list_classes().items():
        package, short = name.split(".")
        maker = make_plain if package == "torch" else _MAKERS.get(short, make_plain)
        build = _BUILDERS.get(name, build_convolutions)
        cases[name] = Case(partial(maker, cls), build, _STEPS.get(short, take_step))
    return cases | {name: Case(make) for name, make in _VARIANTS.items()}
