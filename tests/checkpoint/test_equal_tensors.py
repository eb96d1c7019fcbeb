"""Checkpoints in which several tensors have the same bits."""

import copy

import pytest
import torch
from reliability_tools import edit_manifest
from strategies import same_bits
from torch import nn
from training import equal_states

from slimtensors.checkpoint import (
    build_checkpoint,
    checkpointing,
    flatten,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    verify_run,
)
from slimtensors.checkpoint.store import StoredState
from slimtensors.checkpoint.tensor_entry import TensorFile
from slimtensors.cli import main
from slimtensors.errors import FormatError


def make(kind="ASGD"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    options = {"lr": 0.01} | ({"t0": 3} if kind == "ASGD" else {})
    return model, getattr(torch.optim, kind)(model.parameters(), **options)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()


def weights_size(model, path):
    return save_checkpoint(build_checkpoint(model), path).manifest.bytes


def test_averages_of_asgd_are_stored_once_and_come_back_apart(tmp_path):
    model, optimizer = make()
    train(model, optimizer)
    state = build_checkpoint(model, optimizer)
    saved = save_checkpoint(state, tmp_path / "a")
    assert saved.manifest.bytes < 1.1 * weights_size(model, tmp_path / "w")
    back = load_checkpoint(tmp_path / "a")
    assert equal_states(back, state)
    average = back["optimizer"]["state"][0]["ax"]
    average.add_(1)
    assert same_bits(back["model"]["0.weight"], state["model"]["0.weight"])

    fresh, again = make()
    restore_checkpoint(load_checkpoint(tmp_path / "a"), fresh, again)
    torch.manual_seed(1)
    train(model, optimizer, 5)
    torch.manual_seed(1)
    train(fresh, again, 5)
    assert equal_states(fresh.state_dict(), model.state_dict())
    assert equal_states(again.state_dict(), optimizer.state_dict())


@pytest.mark.parametrize("base", ["auto", "chain", None])
def test_tensors_may_become_equal_and_different_in_a_run(tmp_path, base):
    model, optimizer = make("AdamW")
    teacher = copy.deepcopy(model)
    states = {}
    with checkpointing(
        tmp_path, model, optimizer, models={"teacher": teacher}, every=1, base=base
    ) as ckpt:
        for step in range(1, 6):
            train(model, optimizer)
            if step % 2:
                teacher.load_state_dict(model.state_dict())
            ckpt.step()
            ckpt.wait()
            states[step] = copy.deepcopy(
                build_checkpoint(model, optimizer, models={"teacher": teacher})
            )
    for step, state in states.items():
        path = tmp_path / f"step-{step:08d}"
        back = load_checkpoint(path)
        for key in ("model", "models", "optimizer"):
            assert equal_states(back[key], state[key]), (step, key)
        flatten(path, tmp_path / f"flat-{step}")
        again = load_checkpoint(tmp_path / f"flat-{step}")
        assert equal_states(again, back)
    assert verify_run(tmp_path)


@pytest.mark.parametrize("is_first_tied", [False, True])
@pytest.mark.parametrize("has_base", [False, True])
def test_a_tensor_with_tied_names_may_equal_another(tmp_path, has_base, is_first_tied):
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    if is_first_tied:
        model[1].weight = model[0].weight
    average = copy.deepcopy(model)
    average[1].weight = average[0].weight
    base = tmp_path / "base" if has_base else None
    if base:
        save_checkpoint(build_checkpoint(model), base)
    state = build_checkpoint(model, extra={"average": average})
    save_checkpoint(state, tmp_path / "a", base=base)
    back = load_checkpoint(tmp_path / "a")
    assert equal_states(back["model"], state["model"])
    assert equal_states(back["average"], state["average"])
    assert back["average"]["0.weight"] is back["average"]["1.weight"]
    assert back["average"]["0.weight"].data_ptr() != back["model"]["0.weight"].data_ptr()
    assert verify_run(tmp_path)


@pytest.mark.parametrize("profile", ["exact", "optimizer-bf16", "optimizer", "all"])
@pytest.mark.parametrize("has_base", [False, True])
def test_only_exact_tensors_are_stored_once(tmp_path, profile, has_base):
    model, optimizer = make("AdamW")
    train(model, optimizer)
    base = None
    if has_base:
        save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "base")
        base = tmp_path / "base"
        train(model, optimizer)
    frozen = copy.deepcopy(optimizer.state_dict()["state"])
    extra = {"ema": copy.deepcopy(dict(model.state_dict())), "frozen": frozen}
    state = build_checkpoint(model, optimizer, step=1, extra=extra)
    saved = save_checkpoint(state, tmp_path / "a", base=base, profile=profile)
    back = load_checkpoint(tmp_path / "a")
    assert equal_states(back["ema"], extra["ema"])
    assert equal_states(back["frozen"], extra["frozen"])
    is_lossy = {name.partition(".")[0] for name in saved.errors}
    assert is_lossy <= {"optimizer", "model"}
    assert equal_states(back["model"], state["model"]) == ("model" not in is_lossy)


def test_rounding_to_int8_does_not_reach_a_copy(tmp_path):
    model, _ = make()
    extra = {"ema": copy.deepcopy(dict(model.state_dict()))}
    state = build_checkpoint(model, extra=extra)
    saved = save_checkpoint(state, tmp_path / "a", quantize_i8=True)
    assert sorted(saved.errors) == ["model.0.weight", "model.1.weight"]
    assert equal_states(load_checkpoint(tmp_path / "a")["ema"], extra["ema"])


def test_a_first_moment_is_grouped_by_a_second_moment_that_is_stored_elsewhere(tmp_path):
    scale = (torch.randn(64, 64) * 2).round().mul(2).exp2() * (torch.rand(64, 64) > 0.1)
    second = scale.square()
    seconds = [second, second.clone(), second]  # stored, a copy, tied
    moments = [{"exp_avg": scale * 2**i, "exp_avg_sq": x} for i, x in enumerate(seconds)]
    state = {"optimizer": {"state": dict(enumerate(moments))}, "step": 1}
    save_checkpoint({"step": 0}, tmp_path / "base")
    save_checkpoint(state, tmp_path / "a", base=tmp_path / "base")
    stored = StoredState(tmp_path / "a")
    assert {stored.kind(f"optimizer.state.{i}.exp_avg") for i in range(3)} == {"grouped"}
    assert stored.kind("optimizer.state.1.exp_avg_sq") == "copy"
    back = load_checkpoint(tmp_path / "a")["optimizer"]["state"]
    assert equal_states(back, state["optimizer"]["state"])
    assert back[2]["exp_avg_sq"] is back[0]["exp_avg_sq"]
    assert back[1]["exp_avg_sq"].data_ptr() != back[0]["exp_avg_sq"].data_ptr()


@pytest.mark.parametrize(
    "copies",
    [
        {"x": "nowhere"},
        {"model.0.weight": "model.1.weight"},
        {"x": 3},
        ["x"],
        {f"x{i}": "model.0.weight" for i in range(16)},
    ],
)
def test_invalid_copies_are_rejected(tmp_path, copies):
    model, optimizer = make()
    train(model, optimizer)
    save_checkpoint({"step": 0}, tmp_path / "base")
    state = build_checkpoint(model, optimizer)
    save_checkpoint(state, tmp_path / "a", base=tmp_path / "base")
    file = tmp_path / "a" / "state.safetensors"
    file.write_bytes(edit_manifest(file.read_bytes(), lambda m: m["delta"].update(copies=copies)))
    with pytest.raises(FormatError, match=r"state\.safetensors"):
        TensorFile(file, lambda name, like, each: None)


def test_the_command_line_shows_copies(tmp_path, capsys):
    model, optimizer = make()
    train(model, optimizer)
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "a")
    assert main(["inspect", str(tmp_path / "a")]) == 0
    assert "copy" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "a")]) == 0
    assert main(["inspect", str(tmp_path / "a"), "--html", str(tmp_path / "a.html")]) == 0
