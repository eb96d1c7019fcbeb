"""Checkpoints of several models, optimizers and other objects by name."""

import copy
import logging

import pytest
import torch
from strategies import same_bits
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from training import equal_states

from slimtensors.checkpoint import (
    Filter,
    build_checkpoint,
    checkpointing,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
)
from slimtensors.checkpoint.profiles import describe_tensors
from slimtensors.checkpoint.store import FlatState
from slimtensors.errors import ConfigError, MismatchError


class Gan:
    """Two models, each with an optimizer and a scheduler, and an average of the first."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.models = {
            "generator": nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)),
            "critic": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1)),
        }
        self.optimizers = {
            "generator": torch.optim.AdamW(self.models["generator"].parameters(), lr=0.01),
            "critic": torch.optim.RMSprop(self.models["critic"].parameters(), lr=0.02),
        }
        self.schedulers = {n: StepLR(o, 3, gamma=0.5) for n, o in self.optimizers.items()}
        average = get_ema_multi_avg_fn(0.9)
        self.teacher = AveragedModel(self.models["generator"], multi_avg_fn=average)

    def parts(self):
        return {
            "models": self.models,
            "optimizers": self.optimizers,
            "schedulers": self.schedulers,
        }

    def train(self, steps):
        """Return the losses, which depend on all states and on the random number generator."""
        losses = []
        for _ in range(steps):
            for name, sign in (("critic", -1), ("generator", 1)):
                loss = sign * self.models["critic"](self.models["generator"](torch.randn(4, 8)))
                loss = loss.mean() + self.teacher(torch.randn(4, 8)).square().mean()
                self.optimizers[name].zero_grad()
                loss.backward()
                self.optimizers[name].step()
                self.schedulers[name].step()
                losses.append(loss.item())
            self.teacher.update_parameters(self.models["generator"])
        return losses


def test_several_models_resume_bit_for_bit(tmp_path):
    gan = Gan()
    gan.train(3)
    state = build_checkpoint(**gan.parts(), step=3, extra={"teacher": gan.teacher})
    save_checkpoint(state, tmp_path / "a")
    gan.train(1)
    state = build_checkpoint(**gan.parts(), step=4, extra={"teacher": gan.teacher})
    save_checkpoint(state, tmp_path / "b", base=tmp_path / "a")
    losses = gan.train(4)

    other = Gan(seed=1)
    other.train(1)
    loaded = load_checkpoint(tmp_path / "b")
    restore_checkpoint(loaded, **other.parts(), extra={"teacher": other.teacher})
    assert other.train(4) == losses
    for a, b in zip(gan.models.values(), other.models.values(), strict=True):
        assert equal_states(a.state_dict(), b.state_dict())


@pytest.mark.parametrize("async_", [True, False])
def test_a_loop_resumes_named_models_and_extra_objects(tmp_path, async_):
    whole = Gan()
    losses = whole.train(9)
    gan, seen = Gan(), []
    for end in (5, 9):
        with checkpointing(
            tmp_path, **gan.parts(), extra={"teacher": gan.teacher}, every=2, async_=async_
        ) as ckpt:
            seen = seen[: 2 * ckpt.start]
            for _ in range(ckpt.start, end):
                seen += gan.train(1)
                ckpt.step()
        gan = Gan(seed=end)
    assert seen == losses


def test_a_teacher_beside_a_model_and_its_optimizer(tmp_path):
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    teacher = copy.deepcopy(model)
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    state = build_checkpoint(model, optimizer, models={"teacher": teacher})
    assert list(state["layout"]["optimizer"]) == ["weight", "bias"]
    save_checkpoint(state, tmp_path / "a")
    fresh, other = nn.Linear(4, 4), nn.Linear(4, 4)
    again = torch.optim.AdamW(fresh.parameters())
    restore_checkpoint(load_checkpoint(tmp_path / "a"), fresh, again, models={"teacher": other})
    assert equal_states(dict(fresh.state_dict()), dict(model.state_dict()))
    assert equal_states(dict(other.state_dict()), dict(teacher.state_dict()))


def test_one_optimizer_of_two_models_is_matched_by_name():
    def make(order):
        models = {"actor": nn.Linear(4, 4), "critic": nn.Linear(4, 4)}
        parameters = [p for name in order for p in models[name].parameters()]
        return models, torch.optim.AdamW(parameters)

    models, optimizer = make(["actor", "critic"])
    (models["actor"](torch.ones(4)) + 2 * models["critic"](torch.ones(4))).sum().backward()
    optimizer.step()
    state = build_checkpoint(optimizer=optimizer, models=models)
    others, other = make(["critic", "actor"])
    restore_checkpoint(state, optimizer=other, models=others)
    for name, model in models.items():
        moment = optimizer.state[model.weight]["exp_avg"]
        assert same_bits(other.state[others[name].weight]["exp_avg"], moment)


def test_single_checkpoints_keep_their_keys():
    state = build_checkpoint(nn.Linear(2, 2))
    keys = ["epoch", "step", "metrics", "model", "optimizer", "scheduler", "scaler", "dataloader"]
    assert list(state) == [*keys, "rng", "layout"]
    assert list(state["layout"]) == ["optimizer", "buffers", "embeddings", "norms"]


def test_missing_and_mismatched_parts_raise_with_their_name_and_change_nothing():
    gan, fresh = Gan(), Gan(seed=1)
    gan.train(1)
    before = copy.deepcopy(fresh.models["generator"].state_dict())
    state = build_checkpoint(**gan.parts())
    with pytest.raises(MismatchError, match=r"models\.third: not in the checkpoint"):
        restore_checkpoint(state, models={**fresh.models, "third": nn.Linear(1, 1)})
    swapped = {"generator": fresh.models["generator"], "critic": nn.Linear(3, 3)}
    with pytest.raises(MismatchError, match=r"the models\.critic does not fit"):
        restore_checkpoint(state, models=swapped)
    crossed = dict(zip(fresh.optimizers, reversed(fresh.optimizers.values()), strict=True))
    with pytest.raises(MismatchError, match=r"optimizers\.generator: .*another class"):
        restore_checkpoint(state, models=fresh.models, optimizers=crossed)
    with pytest.raises(MismatchError, match="teacher: not in the checkpoint"):
        restore_checkpoint(state, models=fresh.models, extra={"teacher": fresh.teacher})
    assert equal_states(fresh.models["generator"].state_dict(), before)


def test_invalid_names_and_objects_raise(tmp_path):
    model = nn.Sequential(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="expected a model"):
        build_checkpoint()
    with pytest.raises(ConfigError, match="expected a model"):
        checkpointing(tmp_path)
    with pytest.raises(ConfigError, match=r"models: 'a\.b' is not a valid name"):
        build_checkpoint(models={"a.b": model})
    with pytest.raises(ConfigError, match="'0' is also a submodule"):
        build_checkpoint(model, models={"0": nn.Linear(2, 2)})
    with pytest.raises(ConfigError, match="'models' is a reserved key"):
        build_checkpoint(models={"a": model}, extra={"models": 1})
    with pytest.raises(ConfigError, match=r"'model\.weight' is a reserved key"):
        build_checkpoint(model, extra={"model.weight": torch.ones(2, 2)})
    assert build_checkpoint(model, extra={"a": 1, "a.b": 2})["a.b"] == 2
    with pytest.raises(ConfigError, match="extra: 'n' has no state_dict"):
        checkpointing(tmp_path, model, extra={"n": 3})
    loop = checkpointing(tmp_path, model, extra=lambda: {"ema": nn.Linear(1, 1)}, every=1)
    with loop as ckpt, pytest.raises(ConfigError, match="extra: 'ema' is an object"):
        ckpt.step()


def describe(state):
    flat = FlatState.of(state)
    return describe_tensors(flat.tensors, flat.original)


def test_roles_of_named_models_and_optimizers():
    gan = Gan()
    gan.train(1)
    moments = copy.deepcopy(gan.optimizers["generator"].state_dict())
    extra = {"teacher": gan.teacher, "frozen": moments, "state_dict": dict(moments["state"][0])}
    infos = describe(build_checkpoint(**gan.parts(), extra=extra))
    assert infos["models.critic.0.weight"].roles == {"weights"}
    assert infos["models.generator.1.running_mean"].roles == {"buffers"}
    assert infos["models.generator.1.weight"].roles == {"weights", "norms"}
    moment = infos["optimizers.generator.state.2.exp_avg"]
    assert (moment.roles, moment.parameter) == ({"exp_avg"}, "generator.1.weight")
    assert moment.sibling("exp_avg_sq") == "optimizers.generator.state.2.exp_avg_sq"
    assert infos["optimizers.critic.state.2.square_avg"].parameter == "critic.2.weight"
    for name, info in infos.items():
        if name.partition(".")[0] in extra:
            assert (info.roles, info.parameter) == ({"other"}, ""), name


def test_a_lossy_profile_rounds_no_extra_and_no_other_optimizer(tmp_path):
    gan = Gan()
    gan.train(2)
    extra = {"frozen": copy.deepcopy(gan.optimizers["generator"].state_dict())}
    state = build_checkpoint(**gan.parts(), extra=extra)
    saved = save_checkpoint(state, tmp_path / "a", profile="optimizer-bf16")
    assert {name.rpartition(".state.")[0] for name in saved.errors} == {"optimizers.generator"}
    back = load_checkpoint(tmp_path / "a")
    assert equal_states(back["frozen"], state["frozen"])
    assert equal_states(back["models"], state["models"])
    assert equal_states(back["optimizers"]["critic"], state["optimizers"]["critic"])

    chosen = Filter(modules=("generator.0",))
    saved = save_checkpoint(state, tmp_path / "b", profile="optimizer-bf16", lossy=chosen)
    moments = [f"optimizers.generator.state.0.{key}" for key in ("exp_avg", "exp_avg_sq")]
    assert sorted(saved.errors) == moments


def test_history_keeps_all_models(tmp_path):
    gan = Gan()
    gan.train(1)
    state = build_checkpoint(**gan.parts(), extra={"teacher": gan.teacher})
    save_checkpoint(state, tmp_path / "a", profile="history")
    back = load_checkpoint(tmp_path / "a")
    assert back["models"].keys() == {"generator", "critic"}
    assert back["optimizers"] is back["teacher"] is None
    restore_checkpoint(back, models=Gan(seed=1).models, rng_state=False)


def compiled(model):
    return torch.compile(model, backend="eager")


def parallel(model):
    return nn.DataParallel(model)


def compiled_inside(model):
    model[0] = torch.compile(model[0], backend="eager")
    return model


WRAPPERS = [
    lambda model: model,
    compiled,
    parallel,
    compiled_inside,
    lambda model: compiled(parallel(model)),
    lambda model: parallel(compiled(model)),
]


@pytest.mark.parametrize("now", WRAPPERS)
@pytest.mark.parametrize("before", WRAPPERS)
def test_prefixes_of_wrapped_models_match_in_both_directions(caplog, before, now):
    def make(wrap):
        plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        model = wrap(plain)
        return plain, model, torch.optim.AdamW(model.parameters())

    plain, model, optimizer = make(before)
    plain(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    state = build_checkpoint(model, optimizer, models={"copy": model})
    other_plain, other, again = make(now)
    with caplog.at_level(logging.INFO):
        restore_checkpoint(state, other, again, models={"copy": other})
    for x, y in zip(plain.state_dict().values(), other_plain.state_dict().values(), strict=True):
        assert same_bits(x, y)
    assert equal_states(optimizer.state_dict()["state"], again.state_dict()["state"])
    is_reported = "model: names matched without the prefixes" in caplog.text
    assert is_reported == (model.state_dict().keys() != other.state_dict().keys())


def test_a_wrapped_model_that_does_not_fit_raises_with_the_missing_names():
    state = build_checkpoint(parallel(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))))
    with pytest.raises(MismatchError) as caught:
        restore_checkpoint(state, nn.Sequential(nn.Linear(2, 2)))
    assert "module.1.weight: not in the model" in str(caught.value)
    assert "0.weight" not in str(caught.value)


def test_filters_select_modules_of_wrapped_models(tmp_path):
    model = parallel(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model.module(torch.randn(2, 8)).square().sum().backward()
    optimizer.step()
    infos = describe(build_checkpoint(model, optimizer))
    assert infos["model.module.0.weight"].parameter == "0.weight"
    assert infos["optimizer.state.0.exp_avg"].parameter == "0.weight"
