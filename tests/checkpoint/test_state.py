"""Training states: building, checking, restoring."""

from argparse import Namespace
from collections import deque
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from training import Batches, Net, Run, build_state, equal_states

from slimtensors.checkpoint import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from slimtensors.errors import ConfigError, MismatchError, UnsupportedTensorError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_resumes_bit_for_bit(tmp_path, dtype):
    run = Run(dtype=dtype)
    run.train(20)
    save_checkpoint(build_state(run, epoch=1), tmp_path / "here")
    losses = run.train(20)

    other = Run(seed=7, dtype=dtype)
    other.train(3)
    restore_checkpoint(load_checkpoint(tmp_path / "here"), *other.parts(), dataloader=other.batches)
    assert other.train(20) == losses
    other.step = run.step
    assert equal_states(build_state(run), build_state(other))


def test_a_state_round_trips_with_every_type(tmp_path):
    run = Run()
    run.train(2)
    extra = {"ema": [run.model.back.weight.double()], "name": ("run", 3, None, 1.5, torch.int8)}
    state = build_state(run, epoch=4, metrics={"loss": 0.5}, extra=extra)
    save_checkpoint(state, tmp_path / "here")
    back = load_checkpoint(tmp_path / "here")
    assert equal_states(back, state)
    assert back["model"]["out.weight"] is back["model"]["words.weight"]
    assert back["layout"]["embeddings"] == ["words.weight"]
    assert set(back["layout"]["norms"]) >= {"hidden.2.weight", "norm.bias"}


def test_values_of_the_standard_library_round_trip_in_full_checkpoints_and_deltas(tmp_path):
    extra = {
        "loader": {"seen": {1, 2}, "window": deque([1.5], maxlen=3), "raw": bytearray(b"x")},
        "range": range(1, 9, 2),
        "args": Namespace(path=Path("data"), started=datetime(2024, 2, 29, tzinfo=UTC)),
        "took": timedelta(hours=1),
        "long": bytes(range(256)) * 1000,
    }
    run = Run()
    for name, base in (("a", None), ("b", tmp_path / "a")):
        run.train(1)
        save_checkpoint(build_state(run, extra=extra), tmp_path / name, base=base)
        back = load_checkpoint(tmp_path / name)
        assert {key: back[key] for key in extra} == extra
        assert equal_states(back["model"], run.model.state_dict())


def test_optimizer_states_of_higher_precision_keep_their_dtype(tmp_path):
    class Master(torch.optim.SGD):
        """SGD with a float32 copy of each parameter."""

        def step(self):
            for p in (p for group in self.param_groups for p in group["params"]):
                master = self.state[p].setdefault("master", p.detach().float())
                master -= 1e-3 * p.grad.float()
                p.data.copy_(master)

    torch.manual_seed(0)
    model = nn.Linear(8, 8).bfloat16()
    optimizer = Master(model.parameters())
    model(torch.ones(1, 8).bfloat16()).sum().backward()
    optimizer.step()
    save_checkpoint(build_checkpoint(model, optimizer), tmp_path / "here")
    fresh = nn.Linear(8, 8).bfloat16()
    again = Master(fresh.parameters())
    restore_checkpoint(load_checkpoint(tmp_path / "here"), fresh, again)
    assert equal_states(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.state[fresh.weight]["master"].dtype is torch.float32


def test_training_does_not_change_a_restored_checkpoint(tmp_path):
    run = Run()
    run.train(2)
    save_checkpoint(build_state(run), tmp_path / "here")
    state = load_checkpoint(tmp_path / "here")
    restore_checkpoint(state, *run.parts())
    run.train(2)
    assert equal_states(state, load_checkpoint(tmp_path / "here"))


def test_an_unsupported_value_raises_with_its_path(tmp_path):
    with pytest.raises(UnsupportedTensorError, match=r"optimizer\.hook: .*function"):
        save_checkpoint({"optimizer": {"hook": lambda: None}}, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_not_a_dict_raises_with_its_type(tmp_path):
    with pytest.raises(UnsupportedTensorError, match="returned by build_checkpoint, got Linear"):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "here")


def test_a_mismatched_model_raises_with_names_and_shapes():
    run = Run()
    before = build_state(run)
    with pytest.raises(MismatchError) as caught:
        restore_checkpoint(before, nn.Sequential(nn.Linear(2, 2)))
    assert "words.weight: not in the model" in str(caught.value)
    assert "0.bias: not in the checkpoint" in str(caught.value)
    wide = Net(width=16)
    copy = {name: x.clone() for name, x in wide.state_dict().items()}
    with pytest.raises(MismatchError, match=r"words.weight: \[50, 32\] in the checkpoint, \[50, 1"):
        restore_checkpoint(before, wide)
    assert equal_states(copy, dict(wide.state_dict()))


def test_a_mismatched_optimizer_raises_and_changes_nothing():
    run = Run()
    run.train(1)
    before = build_state(run)
    fresh = Run(seed=1)
    groups = torch.optim.AdamW(fresh.model.parameters())
    with pytest.raises(MismatchError, match="2 parameter groups in the checkpoint, 1 now"):
        restore_checkpoint(before, fresh.model, groups)
    matrices = [p for p in fresh.model.parameters() if p.dim() > 1]
    vectors = [p for p in fresh.model.parameters() if p.dim() < 2]
    fewer = torch.optim.AdamW([{"params": matrices[:-1]}, {"params": vectors}])
    with pytest.raises(
        MismatchError, match=r"group 0: 3 parameters .* 2 now\n  back.weight: not in"
    ):
        restore_checkpoint(before, fresh.model, fewer)
    assert equal_states(dict(fresh.model.state_dict()), dict(Run(seed=1).model.state_dict()))


def test_another_optimizer_class_raises_and_new_options_do_not():
    run = Run()
    run.train(1)
    before = build_state(run)

    def groups():
        return [{"params": group["params"]} for group in run.optimizer.param_groups]

    other = torch.optim.SGD(groups(), lr=0.1, momentum=0.9)
    with pytest.raises(MismatchError, match=r"another class: torch.*AdamW in .*SGD now"):
        restore_checkpoint(before, run.model, other)
    del before["layout"]["optimizer_class"]  # missing in checkpoints of earlier versions
    with pytest.raises(MismatchError, match=r"group 1: another class .* momentum, nesterov now"):
        restore_checkpoint(before, run.model, other)
    for group in before["optimizer"]["param_groups"]:
        group["initial_lr"] = 0.1  # added by schedulers
        del group["maximize"]  # missing in old releases of torch
    restore_checkpoint(before, run.model, torch.optim.AdamW(groups()))


def test_restoring_a_part_that_was_not_saved_raises():
    run = Run()
    state = build_checkpoint(run.model)
    with pytest.raises(MismatchError, match="optimizer: not in the checkpoint"):
        restore_checkpoint(state, run.model, run.optimizer)
    with pytest.raises(MismatchError, match="dataloader: not in the checkpoint"):
        restore_checkpoint(state, run.model, dataloader=Batches())


def test_rng_states_of_another_device_count_raise():
    run = Run()
    state = build_state(run)
    state["rng"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    with pytest.raises(MismatchError, match="pass rng_state=False"):
        restore_checkpoint(state, run.model)
    restore_checkpoint(state, run.model, rng_state=False)


def test_extra_cannot_use_reserved_keys():
    with pytest.raises(ConfigError, match="'model' is a reserved key"):
        build_checkpoint(nn.Linear(1, 1), extra={"model": 1})
