"""Memory formats of tensors in checkpoints: channels_last models resume as they were."""

import pytest
import torch
from checkpoint.optimizer_cases import build_convolutions, take_step
from strategies import same_bits
from torch import nn
from training import copy_state, equal_states, find_strides

import slimtensors
from slimtensors.checkpoint import (
    build_checkpoint,
    checkpointing,
    flatten,
    list_checkpoints,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)

CONTIGUOUS, CHANNELS_LAST = torch.contiguous_format, torch.channels_last


def start(seed, memory_format=CHANNELS_LAST):
    torch.manual_seed(seed)
    model = build_convolutions().to(memory_format=memory_format)
    model.register_buffer("mean", torch.rand(2, 3, 4, 5).to(memory_format=memory_format))
    return model, torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def train(model, optimizer, steps):
    for seed in steps:
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        take_step(model, optimizer, x)


@pytest.fixture(scope="module")
def run():
    """Return two states of a run and its result."""
    model, optimizer = start(0)
    train(model, optimizer, range(2))
    first = copy_state(build_checkpoint(model, optimizer, step=2))
    train(model, optimizer, range(2, 4))
    second = copy_state(build_checkpoint(model, optimizer, step=4))
    train(model, optimizer, range(4, 8))
    return first, second, copy_state(build_checkpoint(model, optimizer, step=8))


@pytest.mark.parametrize("profile", ["exact", "optimizer-bf16", "optimizer", "all"])
def test_all_tensors_of_a_checkpoint_keep_their_strides(tmp_path, run, profile):
    first, second, _ = run
    save_checkpoint(first, tmp_path / "a")
    save_checkpoint(second, tmp_path / "b", base=tmp_path / "a", profile=profile)
    save_checkpoint(second, tmp_path / "c", profile=profile)
    flatten(tmp_path / "b", tmp_path / "d")
    for name in "bcd":
        assert find_strides(load_checkpoint(tmp_path / name)) == find_strides(second)


def test_a_reduced_checkpoint_and_int8_weights_keep_their_strides(tmp_path, run):
    _, second, _ = run
    save_checkpoint(second, tmp_path / "a", profile="history")
    save_checkpoint(second, tmp_path / "b", quantize_i8=True)
    for name in "ab":
        found = load_checkpoint(tmp_path / name)["model"]
        assert find_strides(found) == find_strides(second["model"])


@pytest.mark.parametrize("is_async", [False, True])
def test_a_loop_resumes_bit_for_bit_in_channels_last(tmp_path, run, is_async):
    model, optimizer = start(0)
    with checkpointing(tmp_path / "run", model, optimizer, every=2, async_=is_async) as ckpt:
        for seed in range(4):
            train(model, optimizer, [seed])
            ckpt.step()
    assert [point.manifest.kind for point in list_checkpoints(tmp_path / "run")][1] == "delta"
    fresh, other = start(1)
    with checkpointing(tmp_path / "run", fresh, other, every=100) as ckpt:
        assert find_strides(ckpt.resumed["optimizer"]) == find_strides(optimizer.state_dict())
        train(fresh, other, range(ckpt.start, 8))
    result = run[2]
    assert equal_states(dict(fresh.state_dict()), dict(result["model"]))
    assert equal_states(other.state_dict(), result["optimizer"])


@pytest.mark.parametrize("before", [CONTIGUOUS, CHANNELS_LAST])
def test_states_follow_the_memory_format_of_their_parameter(before):
    after = CONTIGUOUS if before is CHANNELS_LAST else CHANNELS_LAST
    model, optimizer = start(0, before)
    train(model, optimizer, range(3))
    fresh, other = start(1, after)
    optimizer.state[model[0].weight]["odd"] = torch.rand(3, 3, 3, 8).permute(3, 0, 1, 2)
    restore_checkpoint(build_checkpoint(model, optimizer), fresh, other)
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            x, y = optimizer.state[p][key], other.state[q][key]
            assert y.stride() == q.stride()
            assert same_bits(x.contiguous(), y.contiguous())
    odd = other.state[fresh[0].weight]["odd"]
    assert odd.stride() == optimizer.state[model[0].weight]["odd"].stride()
    del optimizer.state[model[0].weight]["odd"]
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        p.grad = torch.ones_like(p)
        q.grad = torch.ones_like(q)
    optimizer.step()
    other.step()
    for p, q in zip(model.parameters(), fresh.parameters(), strict=True):
        assert same_bits(p.detach().contiguous(), q.detach().contiguous())


def test_a_checkpoint_without_strides_resumes_in_channels_last():
    model, optimizer = start(0)
    train(model, optimizer, range(3))
    state = build_checkpoint(model, optimizer)
    del state["layout"]["strides"]
    for values in state["optimizer"]["state"].values():  # as earlier versions loaded them
        values |= {key: x.contiguous() for key, x in values.items()}
    fresh, other = start(1)
    restore_checkpoint(state, fresh, other)
    assert find_strides(other.state_dict()["state"]) == {
        f".{i}.{key}": p.stride() if key != "step" else ()
        for i, p in enumerate(fresh.parameters())
        for key in ("step", "exp_avg", "exp_avg_sq")
    }


def test_tied_tensors_in_channels_last_stay_tied(tmp_path):
    weight = nn.Parameter(torch.rand(4, 3, 2, 2).to(memory_format=CHANNELS_LAST))
    state = {"model": {"a": weight.detach(), "b": weight.detach()}, "ema": [weight.detach()]}
    save_checkpoint(state, tmp_path / "a")
    save_checkpoint(state, tmp_path / "b", base=tmp_path / "a")
    for name in "ab":
        back = load_checkpoint(tmp_path / name)
        assert back["model"]["a"] is back["model"]["b"] is back["ema"][0]
        assert back["ema"][0].is_contiguous(memory_format=CHANNELS_LAST)


def test_plain_tables_of_tensors_load_contiguous(tmp_path):
    x = torch.rand(4, 3, 2, 2).to(memory_format=CHANNELS_LAST)
    slimtensors.save({"x": x}, tmp_path / "x")
    back = slimtensors.load(tmp_path / "x")["x"]
    assert back.is_contiguous()
    assert same_bits(back, x.contiguous())
