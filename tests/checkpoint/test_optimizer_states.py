"""Restoring optimizers: parameters by name, states of any form, all or nothing."""

import logging
from collections import deque

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, StepLR
from torch.utils.data import DataLoader, IterableDataset
from training import copy_state, equal_states

from slimtensors.checkpoint import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from slimtensors.errors import MismatchError


def build_model(seed=0):
    torch.manual_seed(seed)
    return nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "c")})


def train(model, optimizer, steps=2):
    """Train with a different gradient for each parameter and step."""
    for step in range(steps):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.1 * (i + 1) / (step + 1))
        optimizer.step(lambda: torch.zeros(()))


def states_by_name(model, optimizer):
    return {name: optimizer.state[p] for name, p in model.named_parameters()}


def reload(state, tmp_path):
    save_checkpoint(state, tmp_path / "here")
    return load_checkpoint(tmp_path / "here")


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def test_moments_follow_the_names_of_their_parameters(caplog):
    model = build_model()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    state = copy_state(build_checkpoint(model, optimizer))
    fresh = build_model(1)
    other = adamw(reversed(list(fresh.parameters())))
    with caplog.at_level(logging.INFO, "slimtensors"):
        restore_checkpoint(state, fresh, other)
    assert "matched by name" in caplog.text
    assert equal_states(states_by_name(fresh, other), states_by_name(model, optimizer))
    train(model, optimizer)
    train(fresh, other)
    assert equal_states(dict(fresh.state_dict()), dict(model.state_dict()))


def test_options_of_a_group_follow_the_names_of_its_parameters():
    model = build_model()

    def groups(model):
        weights, biases = ([p for p in model.parameters() if p.dim() == n] for n in (2, 1))
        return [{"params": weights, "weight_decay": 0.5}, {"params": biases, "weight_decay": 0.0}]

    optimizer = adamw(groups(model))
    train(model, optimizer)
    state = copy_state(build_checkpoint(model, optimizer, StepLR(optimizer, 1)))
    fresh = build_model(1)
    other = adamw(groups(fresh)[::-1])
    with pytest.raises(MismatchError, match="which a scheduler does not support"):
        restore_checkpoint(state, fresh, other, StepLR(other, 1))
    assert not other.state
    restore_checkpoint(state, fresh, other)
    assert [group["weight_decay"] for group in other.param_groups] == [0.0, 0.5]
    train(model, optimizer)
    train(fresh, other)
    assert equal_states(dict(fresh.state_dict()), dict(model.state_dict()))
    mixed = adamw([{"params": fresh["a"].parameters()}, {"params": fresh["b"].parameters()}])
    mixed.param_groups[1]["params"] += fresh["c"].parameters()
    with pytest.raises(MismatchError, match="group 0: its parameters had different options"):
        restore_checkpoint(state, fresh, mixed)


def test_unnamed_parameters_are_matched_by_order_and_shape():
    model, loose = build_model(), [nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))]
    optimizer = adamw(loose)
    for p in loose:
        p.grad = torch.ones_like(p)
    optimizer.step()
    state = build_checkpoint(model, optimizer)
    again = [nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(5))]
    other = adamw(again)
    restore_checkpoint(state, model, other)
    assert equal_states(other.state_dict(), optimizer.state_dict())
    with pytest.raises(MismatchError, match=r"parameter 0: \[3\] in the checkpoint, \[5\] now"):
        restore_checkpoint(state, model, adamw(again[::-1]))


def test_a_state_over_all_parameters_is_not_reordered():
    model = build_model()
    optimizer = torch.optim.LBFGS(model.parameters())
    x = torch.ones(2, 4)

    def closure():
        optimizer.zero_grad()
        loss = sum(layer(x).square().sum() for layer in model.values())
        loss.backward()
        return loss

    optimizer.step(closure)
    state = build_checkpoint(model, optimizer)
    other = torch.optim.LBFGS(list(model.parameters())[::-1])
    with pytest.raises(MismatchError, match="a state covers all in one vector"):
        restore_checkpoint(state, model, other)
    assert not other.state


def test_another_optimizer_class_of_equal_options_raises():
    model = build_model()
    state = build_checkpoint(model, adamw(model.parameters()))
    with pytest.raises(MismatchError, match=r"AdamW in the checkpoint, torch.optim.adam.Adam now"):
        restore_checkpoint(state, model, torch.optim.Adam(model.parameters()))
    restore_checkpoint(state, model, torch.optim.AdamW(model.parameters(), fused=True))


def test_classes_of_one_name_are_compared_by_their_options():
    model = build_model()
    state = build_checkpoint(model, adamw(model.parameters()))
    state["layout"]["optimizer_class"] = "__main__.AdamW"  # a script that was renamed
    restore_checkpoint(state, model, adamw(model.parameters()))
    for group in state["optimizer"]["param_groups"]:
        group["clip_threshold"] = group.pop("amsgrad")
    with pytest.raises(MismatchError, match=r"group 0: another class .* amsgrad now"):
        restore_checkpoint(state, model, adamw(model.parameters()))


def test_a_wrapper_of_another_optimizer_raises():
    model = build_model()
    state = build_checkpoint(model, Lookahead(adamw(model.parameters())))
    with pytest.raises(MismatchError, match=r"Lookahead of torch.optim.adamw.AdamW in .*SGD now"):
        restore_checkpoint(state, model, Lookahead(torch.optim.SGD(model.parameters(), lr=0.1)))


class Rich(torch.optim.SGD):
    """An optimizer with states of every form."""

    def step(self, closure=None):
        count = self.state.setdefault("count", torch.tensor([0]))
        count += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            state = self.state[p]
            if not state:
                state["nested"] = {"mean": torch.zeros(p.shape, dtype=torch.float32), "levels": []}
                state["row"] = torch.zeros(p.shape[-1])
                state["window"] = deque([torch.zeros(2)], maxlen=2)
                state["seen"] = {1, 2.5}
                state["kind"] = "plain"
            mean = state["nested"]["mean"]
            mean.lerp_(p.grad.float(), 0.1)
            state["nested"]["levels"].append(float(mean.mean()))
            state["window"].append(torch.full((2,), float(count)))
            p.data.add_(mean.to(p.dtype), alpha=-0.1 * len(state["window"]))


class Lookahead:
    """A wrapper without parameter groups, whose state has another form."""

    def __init__(self, optimizer):
        self.optimizer = optimizer
        self.slow = {}

    def step(self, closure=None):
        self.optimizer.step()
        for i, p in enumerate(p for g in self.optimizer.param_groups for p in g["params"]):
            self.slow.setdefault(i, p.detach().clone()).lerp_(p.detach(), 0.5)
            p.data.copy_(self.slow[i])

    def state_dict(self):
        return {"inner": self.optimizer.state_dict(), "slow": self.slow}

    def load_state_dict(self, state):
        self.slow = state.pop("slow")
        self.optimizer.load_state_dict(state.pop("inner"))


class Wrapped(Lookahead):
    """A wrapper with the parameter groups of its optimizer."""

    @property
    def param_groups(self):
        return self.optimizer.param_groups


def make_rich(model):
    return Rich(model.parameters(), lr=0.1)


def make_wrapped(model):
    return Lookahead(Rich(model.parameters(), lr=0.1))


@pytest.mark.parametrize("make", [make_rich, make_wrapped])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_of_any_form_resume_bit_for_bit_and_twice(tmp_path, make, dtype):
    model = build_model().to(dtype)
    optimizer = make(model)
    train(model, optimizer)
    state = reload(build_checkpoint(model, optimizer), tmp_path)
    saved = copy_state(optimizer.state_dict())
    train(model, optimizer, 3)
    for seed in (1, 2):  # twice from one loaded checkpoint
        fresh = build_model(seed).to(dtype)
        other = make(fresh)
        restore_checkpoint(state, fresh, other)
        assert equal_states(other.state_dict(), saved)
        train(fresh, other, 3)
        assert equal_states(dict(fresh.state_dict()), dict(model.state_dict()))
        assert equal_states(other.state_dict(), optimizer.state_dict())
    inner = other.optimizer if make is make_wrapped else other
    assert inner.state[fresh["a"].weight]["nested"]["mean"].dtype is torch.float32


def test_states_follow_a_parameter_that_changed_its_dtype():
    model = build_model()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    fresh = build_model(1).bfloat16()
    other = adamw(fresh.parameters())
    restore_checkpoint(build_checkpoint(model, optimizer), fresh, other)
    state = other.state[fresh["a"].weight]
    assert (state["exp_avg"].dtype, state["step"].dtype) == (torch.bfloat16, torch.float32)
    train(fresh, other)


def test_states_inside_a_wrapper_follow_the_memory_format_of_their_parameter():
    def start(memory_format):
        model = nn.Conv2d(3, 4, 3).to(memory_format=memory_format)
        return model, Wrapped(adamw(model.parameters()))

    model, optimizer = start(torch.channels_last)
    train(model, optimizer)
    fresh, other = start(torch.contiguous_format)
    restore_checkpoint(build_checkpoint(model, optimizer), fresh, other)
    state = other.optimizer.state[fresh.weight]
    assert state["exp_avg"].stride() == fresh.weight.stride()
    assert torch.equal(state["exp_avg"], optimizer.optimizer.state[model.weight]["exp_avg"])


def test_a_state_with_results_of_gradients_is_copied():
    model = build_model()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    for values in optimizer.state.values():
        values["exp_avg"] = values["exp_avg"] * torch.ones(1, requires_grad=True)
    other = adamw(model.parameters())
    restore_checkpoint(build_checkpoint(model, optimizer), model, other)
    for p in model.parameters():
        assert torch.equal(other.state[p]["exp_avg"], optimizer.state[p]["exp_avg"].detach())


@pytest.mark.parametrize("betas", [(0.9,), (0.9, None), (torch.tensor(0.9),) * 2, 0.9, None])
def test_options_of_other_optimizers_do_not_prevent_a_delta(tmp_path, betas):
    model = build_model()
    optimizer = adamw(model.parameters())
    for i in range(2):
        train(model, optimizer)
        state = build_checkpoint(model, optimizer)
        state["optimizer"]["param_groups"][0]["betas"] = betas
        save_checkpoint(state, tmp_path / str(i), base=tmp_path / "0" if i else None)
    assert equal_states(load_checkpoint(tmp_path / "1")["optimizer"], state["optimizer"])


@pytest.mark.parametrize(
    "damage",
    [
        {"state": []},
        {"param_groups": [{"params": 3}]},
        {"param_groups": [{}]},
        {"param_groups": []},
    ],
)
def test_a_malformed_state_leaves_everything_unchanged(damage):
    model = build_model()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    state = copy_state(build_checkpoint(model, optimizer))
    state["optimizer"] |= damage
    fresh = build_model(1)
    other = adamw(fresh.parameters())
    train(fresh, other, 1)
    before = copy_state(build_checkpoint(fresh, other))
    with pytest.raises(MismatchError, match="optimizer"):
        restore_checkpoint(state, fresh, other)
    assert equal_states(build_checkpoint(fresh, other), before)


def test_a_malformed_layout_is_ignored():
    model = build_model()
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    state = copy_state(build_checkpoint(model, optimizer))
    state["layout"] |= {"dtypes": [3] * 6, "shapes": [3] * 6, "strides": [3] * 6}
    other = adamw(model.parameters())
    restore_checkpoint(state, model, other)
    assert equal_states(other.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (3, "expected a tensor, got int"),
        (torch.ones(8, dtype=torch.complex64), "complex64 in the checkpoint, float32 in the model"),
        (torch.ones(8).to_sparse(), "sparse_coo in the checkpoint, strided in the model"),
        (torch.empty(8, device="meta"), "on the meta device"),
    ],
)
def test_a_malformed_model_leaves_everything_unchanged(value, problem):
    model, fresh = nn.Linear(8, 8), nn.Linear(8, 8)
    optimizer = adamw(fresh.parameters())
    state = copy_state(build_checkpoint(model, adamw(model.parameters())))
    state["model"]["bias"] = value
    before = copy_state(build_checkpoint(fresh, optimizer))
    with pytest.raises(MismatchError, match=f"bias: {problem}"):
        restore_checkpoint(state, fresh, optimizer)
    assert equal_states(build_checkpoint(fresh, optimizer), before)


@pytest.mark.parametrize("part", ["model", "rng"])
def test_a_part_that_is_not_a_dict_raises(part):
    state = copy_state(build_checkpoint(nn.Linear(2, 2)))
    with pytest.raises(MismatchError, match=f"{part}: expected a dict, got int"):
        restore_checkpoint({**state, part: 5}, nn.Linear(2, 2))


def test_a_lazy_model_is_restored():
    model, fresh = nn.LazyLinear(3), nn.LazyLinear(3)
    model(torch.ones(1, 2))
    restore_checkpoint(build_checkpoint(model), fresh)
    assert equal_states(dict(model.state_dict()), dict(fresh.state_dict()))


class Failing:
    """An object that changes before its loading fails."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
        if self.at == 1:
            raise KeyError("no such worker")


def test_an_undo_that_fails_is_reported_beside_the_error():
    class Broken(Failing):
        def load_state_dict(self, state):
            raise RuntimeError("read-only")

    model, fresh = nn.Linear(2, 2), nn.Linear(2, 2)
    state = copy_state(build_checkpoint(model, scheduler=Broken()))
    before = copy_state(build_checkpoint(fresh))
    with pytest.raises(MismatchError, match=r"^scheduler: .*RuntimeError: read-only") as caught:
        restore_checkpoint(state, fresh, scheduler=Broken())
    assert caught.value.__notes__ == ["scheduler: the previous state was not restored: read-only"]
    assert equal_states(build_checkpoint(fresh), before)


class Custom(nn.Linear):
    """A layer that checks its own extra state."""

    def get_extra_state(self):
        return {"levels": [1]}

    def set_extra_state(self, state):
        if state["levels"] != [1]:
            raise ValueError("unknown levels")
        state["levels"].append(2)


@pytest.mark.parametrize("part", ["scheduler", "scaler", "dataloader"])
@pytest.mark.parametrize("make", [lambda model: adamw(model.parameters()), make_rich, make_wrapped])
def test_a_failed_restore_leaves_everything_unchanged(make, part):
    model = build_model()
    optimizer = make(model)
    train(model, optimizer)
    source = Failing()
    source.at = 1
    state = copy_state(build_checkpoint(model, optimizer, **{part: source}))
    fresh = build_model(1)
    other = make(fresh)
    train(fresh, other, 1)
    target = Failing()
    before = copy_state(build_checkpoint(fresh, other, **{part: target}))
    with pytest.raises(MismatchError, match=f"^{part}: .*KeyError: 'no such worker'"):
        restore_checkpoint(state, fresh, other, **{part: target})
    assert equal_states(build_checkpoint(fresh, other, **{part: target}), before)


def test_a_model_that_refuses_its_state_leaves_everything_unchanged():
    model = nn.Sequential(nn.Linear(4, 4), Custom(4, 4))
    optimizer = adamw(model.parameters())
    train(model, optimizer)
    state = copy_state(build_checkpoint(model, optimizer))
    state["model"]["1._extra_state"] = {"levels": [3]}
    fresh = nn.Sequential(nn.Linear(4, 4), Custom(4, 4))
    other = adamw(fresh.parameters())
    before = copy_state(build_checkpoint(fresh, other))
    with pytest.raises(MismatchError, match=r"^model: .*unknown levels"):
        restore_checkpoint(state, fresh, other)
    assert equal_states(build_checkpoint(fresh, other), before)
    state["model"]["1._extra_state"] = {"levels": [1]}
    for _ in range(2):
        restore_checkpoint(state, fresh, other)
        assert state["model"]["1._extra_state"] == {"levels": [1]}


def test_a_malformed_random_state_leaves_everything_unchanged():
    model = build_model()
    state = copy_state(build_checkpoint(model))
    state["rng"]["torch"] = state["rng"]["torch"][:7]
    fresh = build_model(1)
    before = copy_state(build_checkpoint(fresh))
    with pytest.raises(MismatchError, match=r"^rng: "):
        restore_checkpoint(state, fresh)
    assert equal_states(build_checkpoint(fresh), before)


def test_a_scheduler_does_not_change_the_checkpoint():
    class Factor:
        def __init__(self):
            self.levels = [1.0]

        def __call__(self, step):
            self.levels.append(step)
            return 1 / len(self.levels)

    model = build_model()
    optimizer = adamw(model.parameters())
    state = copy_state(build_checkpoint(model, optimizer, LambdaLR(optimizer, Factor())))
    other = adamw(model.parameters())
    losses = []
    for _ in range(2):
        scheduler = LambdaLR(other, Factor())
        restore_checkpoint(state, model, other, scheduler)
        other.step()
        scheduler.step()
        losses.append((scheduler.get_last_lr(), scheduler.lr_lambdas[0].levels))
    assert losses[0] == losses[1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(4))


class StatefulLoader(DataLoader):
    """A dataloader with a state; over an iterable dataset it has no length."""

    at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.parametrize("data", [Stream(), []])
def test_dataloaders_without_items_or_length_are_saved(tmp_path, data):
    model, loader = build_model(), StatefulLoader(data)
    loader.at = 3
    state = reload(build_checkpoint(model, dataloader=loader), tmp_path)
    other = StatefulLoader(data)
    restore_checkpoint(state, model, dataloader=other)
    assert other.at == 3
