"""Training states: what goes into a checkpoint, and training on from one."""

import pytest
import torch
from torch import nn
from training import Batches, Net, Run, built, same_states

from slimtensors.checkpoint import (
    build_checkpoint,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from slimtensors.errors import ConfigError, MismatchError, UnsupportedTensorError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_training_goes_on_bit_for_bit(tmp_path, dtype):
    run = Run(dtype=dtype)
    run.train(20)
    save_checkpoint(built(run, epoch=1), tmp_path / "here")
    losses = run.train(20)

    other = Run(seed=7, dtype=dtype)
    other.train(3)
    restore_checkpoint(load_checkpoint(tmp_path / "here"), *other.parts(), dataloader=other.batches)
    assert other.train(20) == losses
    other.step = run.step
    assert same_states(built(run), built(other))


def test_a_state_comes_back_with_every_type(tmp_path):
    run = Run()
    run.train(2)
    extra = {"ema": [run.model.back.weight.double()], "name": ("run", 3, None, 1.5, torch.int8)}
    state = built(run, epoch=4, metrics={"loss": 0.5}, extra=extra)
    save_checkpoint(state, tmp_path / "here")
    back = load_checkpoint(tmp_path / "here")
    assert same_states(back, state)
    assert back["model"]["out.weight"] is back["model"]["words.weight"]
    assert back["layout"]["embeddings"] == ["words.weight"]
    assert set(back["layout"]["norms"]) >= {"hidden.2.weight", "norm.bias"}


def test_states_finer_than_their_parameters_stay_so(tmp_path):
    class Master(torch.optim.SGD):
        """Keeps a float32 copy of each parameter."""

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
    assert same_states(again.state_dict()["state"], optimizer.state_dict()["state"])
    assert again.state[fresh.weight]["master"].dtype is torch.float32


def test_training_on_does_not_change_the_checkpoint(tmp_path):
    run = Run()
    run.train(2)
    save_checkpoint(built(run), tmp_path / "here")
    state = load_checkpoint(tmp_path / "here")
    restore_checkpoint(state, *run.parts())
    run.train(2)
    assert same_states(state, load_checkpoint(tmp_path / "here"))


def test_what_cannot_be_stored_raises_with_its_path(tmp_path):
    with pytest.raises(UnsupportedTensorError, match=r"optimizer\.hook: a .*function"):
        save_checkpoint({"optimizer": {"hook": lambda: None}}, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_state_is_refused_by_its_kind(tmp_path):
    with pytest.raises(UnsupportedTensorError, match="build_checkpoint returns, not a Linear"):
        save_checkpoint(nn.Linear(2, 2), tmp_path / "here")


def test_a_model_that_does_not_fit_is_refused_with_names_and_shapes():
    run = Run()
    before = built(run)
    with pytest.raises(MismatchError) as caught:
        restore_checkpoint(before, nn.Sequential(nn.Linear(2, 2)))
    assert "words.weight: is not in the model" in str(caught.value)
    assert "0.bias: is not in the checkpoint" in str(caught.value)
    wide = Net(width=16)
    copy = {name: x.clone() for name, x in wide.state_dict().items()}
    with pytest.raises(MismatchError, match=r"words.weight: \[50, 32\] in the checkpoint, \[50, 1"):
        restore_checkpoint(before, wide)
    assert same_states(copy, dict(wide.state_dict()))


def test_an_optimizer_that_does_not_fit_is_refused_and_nothing_changes():
    run = Run()
    run.train(1)
    before = built(run)
    fresh = Run(seed=1)
    groups = torch.optim.AdamW(fresh.model.parameters())
    with pytest.raises(MismatchError, match="2 parameter groups in the checkpoint, 1 now"):
        restore_checkpoint(before, fresh.model, groups)
    order = [p for p in fresh.model.parameters() if p.dim() > 1]
    rest = [p for p in fresh.model.parameters() if p.dim() < 2]
    turned = torch.optim.AdamW([{"params": order[::-1]}, {"params": rest}])
    with pytest.raises(MismatchError, match=r"parameter 0: exp_avg: \[50, 32\] in the checkpoint"):
        restore_checkpoint(before, fresh.model, turned)
    assert same_states(dict(fresh.model.state_dict()), dict(Run(seed=1).model.state_dict()))


def test_another_kind_of_optimizer_is_refused_and_options_of_another_release_are_not():
    run = Run()
    run.train(1)
    before = built(run)

    def groups():
        return [{"params": group["params"]} for group in run.optimizer.param_groups]

    other = torch.optim.SGD(groups(), lr=0.1, momentum=0.9)
    with pytest.raises(
        MismatchError, match=r"group 1: is of another kind .* momentum, nesterov now"
    ):
        restore_checkpoint(before, run.model, other)
    for group in before["optimizer"]["param_groups"]:
        group["initial_lr"] = 0.1  # by a scheduler
        del group["maximize"]  # which an old torch does not have
    restore_checkpoint(before, run.model, torch.optim.AdamW(groups()))


def test_a_part_that_was_not_saved_is_not_restored_silently():
    run = Run()
    state = build_checkpoint(run.model)
    with pytest.raises(MismatchError, match="optimizer: the checkpoint has none"):
        restore_checkpoint(state, run.model, run.optimizer)
    with pytest.raises(MismatchError, match="dataloader: the checkpoint has none"):
        restore_checkpoint(state, run.model, dataloader=Batches())


def test_random_numbers_of_other_devices_are_refused():
    run = Run()
    state = built(run)
    state["rng"]["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 1)
    with pytest.raises(MismatchError, match="pass rng_state=False"):
        restore_checkpoint(state, run.model)
    restore_checkpoint(state, run.model, rng_state=False)


def test_extra_parts_cannot_hide_ours():
    with pytest.raises(ConfigError, match="'model' is a part of every checkpoint"):
        build_checkpoint(nn.Linear(1, 1), extra={"model": 1})
