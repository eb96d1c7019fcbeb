"""Masks during training: all optimizers, schedules, movement pruning."""

import math
from copy import deepcopy
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import same_bits
from torch import nn
from torch.nn import functional

from slimtensors.errors import ConfigError, MismatchError
from slimtensors.layerwise.structure import Unstructured, parse_structure
from slimtensors.quantization.layers import Weight
from slimtensors.recipe.masks import (
    GradualMasks,
    HeldMasks,
    MovementMasks,
    Schedule,
    rank_globally,
    rank_per_layer,
    relative_magnitude,
)

VIEWS = {name: Weight("weight") for name in ("weight", "0.weight", "2.weight")}
ALL, EACH = rank_globally(Unstructured()), rank_per_layer(Unstructured(), VIEWS)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1, foreach=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "adadelta": lambda p: torch.optim.Adadelta(p),
    "rprop": lambda p: torch.optim.Rprop(p),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
}


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8)).to(dtype)


def matrices(model):
    return {name: p for name, p in model.named_parameters() if p.dim() == 2}


def batch(model, step):
    g = torch.Generator().manual_seed(step)
    x = torch.randn(24, 16, generator=g).to(next(model.parameters()).dtype)
    return (model(x).float() - x[:, :8].float().roll(1, 1)).square().mean()


def train(model, optimizer, steps, *, accumulate=1, start=0):
    for step in range(start, start + steps):
        for part in range(accumulate):
            (batch(model, step * 10 + part) / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def nonzero(weights):
    return {name: weight.detach() != 0 for name, weight in weights.items()}


def random_masks(weights, keep=0.4):
    g = torch.Generator().manual_seed(5)
    return {name: torch.rand(w.shape, generator=g) < keep for name, w in weights.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_masks_are_applied_with_every_optimizer(kind, accumulate, dtype):
    model = net(dtype)
    weights = matrices(model)
    masks = random_masks(weights)
    before = {name: w.detach().clone() for name, w in weights.items()}
    optimizer = OPTIMIZERS[kind](model.parameters())
    train(model, optimizer, 2)  # creates optimizer state of weights that are pruned below
    with HeldMasks(weights, masks).during(optimizer) as held_masks:
        for step in range(4):
            train(model, optimizer, 1, accumulate=accumulate, start=2 + step)
            held_masks.check()
            for name, w in weights.items():
                assert same_bits(w.detach()[~masks[name]], torch.zeros_like(w[~masks[name]]))
    for name, w in weights.items():
        moved = w.detach() != before[name]
        assert moved[masks[name]].float().mean() > 0.5
        for x in optimizer.state[w].values():
            if isinstance(x, torch.Tensor) and x.shape == w.shape:
                assert not x[~masks[name]].any()


def test_momentum_of_pruned_weights_is_zero():
    model = net()
    weights, masks = matrices(model), random_masks(matrices(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.99)
    train(model, optimizer, 5)
    held_masks = HeldMasks(weights, masks)
    with held_masks.during(optimizer):
        train(model, optimizer, 1)
    for w in model.parameters():  # without masks, only momentum moves weights
        w.grad = torch.zeros_like(w)
    optimizer.step()
    held_masks.check()


def test_pruned_weights_do_not_affect_gradient_clipping():
    model = net()
    weights, masks = matrices(model), random_masks(matrices(model), keep=0.1)
    with HeldMasks(weights, masks).during(torch.optim.SGD(model.parameters(), lr=0.1)):
        batch(model, 0).backward()
    for name, w in weights.items():
        assert not w.grad[~masks[name]].any()
        assert w.grad[masks[name]].any()


def test_check_finds_changed_weights():
    model = net()
    held_masks = HeldMasks(matrices(model), random_masks(matrices(model)))
    held_masks.check()
    with torch.no_grad():
        model[2].weight.fill_(1)
    with pytest.raises(MismatchError, match=r"2.weight: \d+ pruned weights are not zero"):
        held_masks.check()


def test_frozen_weights_are_masked_too():
    model = net()
    model[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with HeldMasks(matrices(model), random_masks(matrices(model))).during(optimizer) as held_masks:
        train(model, optimizer, 2)
        held_masks.check()


def test_zeros_of_a_sparse_model_are_preserved():
    model = net()
    HeldMasks(matrices(model), random_masks(matrices(model)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    before = {name: w.detach() == 0 for name, w in matrices(model).items()}
    with HeldMasks(matrices(model), nonzero(matrices(model))).during(optimizer):
        train(model, optimizer, 3)
    assert all(torch.equal(w == 0, before[name]) for name, w in matrices(model).items())


@given(
    start=st.integers(0, 20),
    length=st.integers(0, 50),
    every=st.integers(1, 9),
    shares=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99)),
)
def test_a_schedule_grows_to_its_final_sparsity(start, length, every, shares):
    schedule = Schedule(start, start + length, min(shares), max(shares), every)
    at = [schedule.at(step) for step in range(start + length + 5)]
    assert all(a <= b + 1e-12 for a, b in pairwise(at))
    assert at[-1] == max(shares)
    assert all(x == 0 for x in at[:start])
    assert schedule.is_due(start)
    assert schedule.is_due(schedule.end)
    assert not schedule.is_due(schedule.end + 1)


def test_a_schedule_is_cubic():
    schedule = Schedule(10, 110, 0.2, 0.9)
    assert math.isclose(schedule.at(10), 0.2)
    assert math.isclose(schedule.at(60), 0.9 - 0.7 * 0.5**3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ((5, 4, 0.0, 0.5), "from step 5 to step 4"),
        ((0, 4, 0.5, 0.4), "sparsity must grow"),
        ((0, 4, 0.5, 1.0), "sparsity must grow"),
        ((0, 4, 0.0, 0.5, 0), "every"),
    ],
)
def test_invalid_schedules_raise(fields, message):
    with pytest.raises(ConfigError, match=message):
        Schedule(*fields)


@pytest.mark.parametrize("ranking", [ALL, EACH], ids=["all", "each"])
def test_gradual_pruning_reaches_its_sparsity_and_restores_nothing(ranking):
    model = net()
    weights = matrices(model)
    everything = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
    schedule = Schedule(2, 12, 0.1, 0.8, every=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    masks = GradualMasks(weights, everything, schedule=schedule, ranking=ranking)
    with masks.during(optimizer):
        pruned = {name: torch.zeros_like(mask) for name, mask in everything.items()}
        for step in range(16):
            train(model, optimizer, 1, start=step)
            masks.check()
            assert all((masks.masks[name] & pruned[name]).sum() == 0 for name in pruned)
            pruned = {name: ~mask for name, mask in masks.masks.items()}
            total = sum(int(x.sum()) for x in pruned.values())
            if schedule.is_due(step + 1):
                assert abs(total / (16 * 32 + 32 * 8) - schedule.at(step + 1)) < 0.004
    if ranking is EACH:
        assert all(int(x.sum()) == round(0.8 * x.numel()) for x in pruned.values())


def test_initial_zeros_stay_pruned():
    for kind, more in ((GradualMasks, {}), (MovementMasks, {"rate": 0.01})):
        model = net()
        weights, masks = matrices(model), random_masks(matrices(model), keep=0.4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        schedule = Schedule(0, 3, 0.0, 0.5)
        pruned = kind(weights, masks, schedule=schedule, ranking=EACH, **more)
        with pruned.during(optimizer):
            train(model, optimizer, 5)
        assert all(torch.equal(pruned.masks[name], mask) for name, mask in masks.items())


@pytest.mark.parametrize("name", ["2:4", "1:8", "rows", "8x4"])
def test_gradual_pruning_ends_with_the_requested_structure(name):
    structure = parse_structure(name)
    final = structure.share or 0.5
    model = net()
    weights = matrices(model)
    everything = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    masks = GradualMasks(
        weights,
        everything,
        schedule=Schedule(0, 6, 0, final, power=1),
        ranking=rank_per_layer(structure, VIEWS),
    )
    with masks.during(optimizer):
        for step in range(7):
            share = min(1, step / 6) * final
            for mask in masks.masks.values():
                assert abs(1 - mask.float().mean().item() - share) < 0.07
            train(model, optimizer, 1, start=step)
    for mask in masks.masks.values():
        assert abs(1 - mask.float().mean().item() - final) < 1e-6
        assert torch.equal(structure.zeros(mask.float(), final), ~mask)


def test_structures_follow_the_inputs_of_transposed_layers():
    scores = torch.rand(8, 6, generator=torch.Generator().manual_seed(0))
    rank_transposed = rank_per_layer(
        parse_structure("2:4"), {"x": Weight("weight", transposed=True)}
    )
    rank_plain = rank_per_layer(parse_structure("2:4"), {"x": Weight("weight")})
    mask = rank_transposed({"x": scores}, 0.5)["x"]
    assert torch.equal(mask, rank_plain({"x": scores.T.contiguous()}, 0.5)["x"].T)
    stack = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(0))
    experts = rank_per_layer(parse_structure("2:4"), {"x": Weight("up", stacked=True)})(
        {"x": stack}, 0.5
    )["x"]
    assert torch.equal(experts[1], rank_plain({"x": stack[1]}, 0.5)["x"])


def kept(scores, share):
    return ~Unstructured().zeros(scores.detach(), share)


class Kept(torch.autograd.Function):
    """Mask of the highest scores, with a straight-through gradient."""

    @staticmethod
    def forward(ctx, scores, share):
        return kept(scores, share).float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def test_movement_pruning_matches_straight_through_masks():
    schedule = Schedule(2, 14, 0.1, 0.7)
    torch.manual_seed(0)
    linear = nn.Linear(12, 10)
    weight = linear.weight.detach().clone().requires_grad_()
    bias = linear.bias.detach().clone().requires_grad_()
    scores = torch.zeros(10, 12, requires_grad=True)
    plain = torch.optim.SGD([weight, bias], lr=0.05)
    learner = torch.optim.Adam([scores], lr=0.01)
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.05)
    weights = {"weight": linear.weight}
    everything = {"weight": torch.ones(10, 12, dtype=torch.bool)}
    masks = MovementMasks(weights, everything, schedule=schedule, ranking=EACH, rate=0.01)
    came_back = 0
    with masks.during(optimizer):
        for step in range(14):
            g = torch.Generator().manual_seed(step)
            x, y = torch.randn(6, 12, generator=g), torch.randn(6, 10, generator=g)
            mask = Kept.apply(scores, schedule.at(step))
            (functional.linear(x, weight * mask, bias) - y).square().mean().backward()
            for each in (plain, learner):
                each.step()
                each.zero_grad()
            before = masks.masks["weight"].clone()
            (linear(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            expected = kept(scores, schedule.at(step + 1))
            assert torch.equal(masks.masks["weight"], expected)
            came_back += int((expected & ~before).sum())
            torch.testing.assert_close(linear.weight, weight.detach() * expected)
    assert came_back > 0
    assert int((linear.weight == 0).sum()) == round(0.7 * 120)


def test_scores_may_be_initialized_with_magnitudes():
    model = net()
    weights = matrices(model)
    everything = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
    begin = {name: w.detach().abs() for name, w in weights.items()}
    masks = MovementMasks(
        weights,
        everything,
        schedule=Schedule(0, 4, 0.5, 0.9),
        ranking=EACH,
        rate=0.01,
        first=relative_magnitude,
    )
    for name, mask in masks.masks.items():
        assert begin[name][mask].min() >= begin[name][~mask].max()
    assert torch.equal(relative_magnitude(torch.zeros(2, 3)), torch.zeros(2, 3))


def test_movement_masks_are_constant_after_the_schedule():
    model = net()
    weights = matrices(model)
    everything = {name: torch.ones_like(w, dtype=torch.bool) for name, w in weights.items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    masks = MovementMasks(
        weights,
        everything,
        schedule=Schedule(0, 4, 0, 0.9),
        ranking=ALL,
        rate=0.01,
    )
    with masks.during(optimizer):
        train(model, optimizer, 4)
        last = {name: mask.clone() for name, mask in masks.masks.items()}
        train(model, optimizer, 4, start=4)
    assert all(torch.equal(masks.masks[name], mask) for name, mask in last.items())
    assert sum(int(w.count_nonzero()) for w in weights.values()) == round(0.1 * (16 * 32 + 32 * 8))


@pytest.mark.parametrize("kind", [HeldMasks, GradualMasks, MovementMasks])
def test_masks_resume_from_their_state(kind):
    def make_masks(model):
        masks = random_masks(matrices(model), keep=0.9)
        more = {"schedule": Schedule(1, 8, 0, 0.8), "ranking": ALL}
        more |= {"rate": 0.01} if kind is MovementMasks else {}
        return kind(matrices(model), masks, **({} if kind is HeldMasks else more))

    model, again = net(), net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    masks = make_masks(model)
    with masks.during(optimizer):
        train(model, optimizer, 5)
        held_masks = make_masks(again)
        held_masks.load_state_dict(masks.state_dict())
        again.load_state_dict(model.state_dict())
        resumed = torch.optim.AdamW(again.parameters(), lr=0.01)
        resumed.load_state_dict(deepcopy(optimizer.state_dict()))
        train(model, optimizer, 6, start=5)
    with held_masks.during(resumed):
        train(again, resumed, 6, start=5)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        assert same_bits(a.detach(), b.detach())


def test_a_state_of_other_weights_raises():
    model = net()
    weights = matrices(model)
    one = HeldMasks({"0.weight": weights["0.weight"]}, nonzero(weights))
    with pytest.raises(MismatchError, match=r"2\.weight is pruned in this run only"):
        HeldMasks(weights, nonzero(weights)).load_state_dict(one.state_dict())
    with pytest.raises(
        MismatchError, match=r"0.weight: the mask has shape \[3\], expected \[32, 16\]"
    ):
        HeldMasks({"0.weight": weights["0.weight"]}, {"0.weight": torch.ones(3)})
