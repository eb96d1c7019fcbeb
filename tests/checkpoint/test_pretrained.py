"""Checkpoints that store weights as differences from a pretrained model."""

import json
import os
import shutil
import signal

import pytest
import torch
from checkpoint.manifests import edit_manifest
from checkpoint.programs import start_program
from strategies import same_bits
from torch import nn
from training import equal_states
from tuning import Tuning, save_model

import slimtensors
from slimtensors.checkpoint import (
    build_checkpoint,
    checkpointing,
    flatten,
    list_checkpoints,
    load_checkpoint,
    restore_checkpoint,
    save_checkpoint,
    verify_run,
)
from slimtensors.checkpoint.loop_folder import RunIntegrity
from slimtensors.cli import main
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError, MissingBaseError


def read_kinds(folder):
    """Return the entries of a checkpoint by name."""
    with slimtensors.open(folder / "state.safetensors") as archive:
        return dict(archive.delta["checkpoint"])


@pytest.fixture
def tuning():
    return Tuning()


FORMS = {
    "dense": {"preset": "dense"},
    "compressed": {"preset": "lossless"},
    "sharded": {"preset": "dense", "max_shard_size": "40KB"},
    "compressed-shards": {"preset": "lossless", "max_shard_size": "40KB"},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("form", FORMS)
def test_frozen_weights_take_no_space(tmp_path, form, dtype):
    tuning = Tuning(dtype)
    base = save_model(tuning.model, tmp_path / "base", **FORMS[form])
    tuning.train()
    state = tuning.state()
    saved = save_checkpoint(state, tmp_path / "a", base=base)
    entries = read_kinds(tmp_path / "a")
    frozen = [name for name, p in tuning.model.named_parameters() if not p.requires_grad]
    assert all(entries[f"model.{name}"]["as"] == "same" for name in frozen)
    assert entries["model.8.weight"]["as"] != "same"
    assert saved.manifest.pretrained.name == "base"
    assert (saved.manifest.kind, saved.manifest.base, saved.unmatched) == ("delta", None, [])
    assert equal_states(load_checkpoint(tmp_path / "a"), state)


def test_fine_tuning_a_twentieth_of_the_parameters_takes_a_tenth_of_torch_save(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(160, 160) for _ in range(20)))
    base = save_model(model, tmp_path / "base")
    model.requires_grad_(False)[-1].requires_grad_(True)
    optimizer = torch.optim.SGD(model[-1].parameters(), lr=1e-3, momentum=0.9)
    model(torch.randn(8, 160)).square().mean().backward()
    optimizer.step()
    state = build_checkpoint(model, optimizer, rng_state=False)
    saved = save_checkpoint(state, tmp_path / "a", pretrained=base)
    torch.save(state, tmp_path / "plain.pt")
    assert saved.manifest.bytes < 0.1 * (tmp_path / "plain.pt").stat().st_size


@pytest.mark.parametrize("prefix", ["bert.", "a.b."])
def test_names_match_without_prefixes(tmp_path, tuning, prefix):
    base = save_model(tuning.model, tmp_path / "base", prefix=prefix)
    state = tuning.state()
    assert save_checkpoint(state, tmp_path / "a", base=base).unmatched == []
    assert {entry["as"] for name, entry in read_kinds(tmp_path / "a").items() if "model" in name}
    wrapped = nn.Module()
    wrapped.module = nn.Module()
    wrapped.module._orig_mod = tuning.model
    other = build_checkpoint(wrapped, rng_state=False)
    save_checkpoint(other, tmp_path / "b", base=base)
    kinds = {entry["as"] for entry in read_kinds(tmp_path / "b").values()}
    assert kinds == {"same"}
    assert equal_states(load_checkpoint(tmp_path / "b"), other)


def test_renamed_frozen_weights_are_found_by_their_bits(tmp_path, tuning):
    weights = {f"part{i}": x for i, x in enumerate(tuning.model.state_dict().values())}
    slimtensors.save(weights, tmp_path / "base.safetensors")
    saved = save_checkpoint(
        tuning.state(), tmp_path / "a", pretrained=tmp_path / "base.safetensors"
    )
    assert saved.unmatched == []
    assert read_kinds(tmp_path / "a")["model.3.weight"]["from"] == ["part5"]
    tuning.train()
    state = tuning.state()
    saved = save_checkpoint(state, tmp_path / "b", pretrained=tmp_path / "base.safetensors")
    assert saved.unmatched == ["model.8.bias", "model.8.weight"]
    assert equal_states(load_checkpoint(tmp_path / "b"), state)


def test_weights_in_another_precision_than_the_file_are_found(tmp_path):
    tuning = Tuning(torch.bfloat16)
    base = save_model(tuning.model, tmp_path / "base")
    tuning.model.float()
    state = build_checkpoint(tuning.model, rng_state=False)
    save_checkpoint(state, tmp_path / "a", base=base)
    assert {entry["as"] for entry in read_kinds(tmp_path / "a").values()} == {"same"}
    assert equal_states(load_checkpoint(tmp_path / "a"), state)


def test_tied_weights_match_under_any_of_their_names(tmp_path):
    model = nn.Module()
    model.head, model.words = nn.Linear(64, 50, bias=False), nn.Embedding(50, 64)
    model.head.weight = model.words.weight
    slimtensors.save({"words.weight": model.words.weight.detach()}, tmp_path / "base.safetensors")
    state = build_checkpoint(model, rng_state=False)
    saved = save_checkpoint(state, tmp_path / "a", base=tmp_path / "base.safetensors")
    assert [entry["as"] for entry in read_kinds(tmp_path / "a").values()] == ["same"]
    assert saved.unmatched == []
    loaded = load_checkpoint(tmp_path / "a")["model"]
    assert same_bits(loaded["head.weight"], model.words.weight.detach())
    assert loaded["head.weight"].data_ptr() == loaded["words.weight"].data_ptr()


def test_bits_of_nan_and_negative_zero_come_back(tmp_path, tuning):
    words = torch.tensor([0x7FC12345, 0x7F800001, -(2**31), 0], dtype=torch.int32)
    with torch.no_grad():
        tuning.model[8].bias[:4] = words.view(torch.float32)
        tuning.model[3].bias[:4] = words.view(torch.float32)
    base = save_model(tuning.model, tmp_path / "base")
    with torch.no_grad():
        tuning.model[8].bias[8:12] = words.view(torch.float32)
    state = tuning.state()
    save_checkpoint(state, tmp_path / "a", base=base)
    assert equal_states(load_checkpoint(tmp_path / "a"), state)


def test_a_moved_model_is_found_by_content(tmp_path, tuning, monkeypatch):
    base = save_model(tuning.model, tmp_path / "base")
    tuning.train()
    state = tuning.state()
    run = tmp_path / "runs" / "one"
    run.mkdir(parents=True)
    save_checkpoint(state, run / "a", pretrained=base)
    assert equal_states(load_checkpoint(run / "a"), state)  # where it was
    decoy = Tuning()
    with torch.no_grad():
        decoy.model[2].weight[0, 0] += 1
    save_model(decoy.model, run.parent / "base")  # same name and shapes
    shutil.move(base, run.parent / "renamed")
    assert equal_states(load_checkpoint(run / "a"), state)  # beside the run
    (tmp_path / "models").mkdir()
    shutil.move(run.parent / "renamed", tmp_path / "models" / "x")
    with pytest.raises(MissingBaseError, match=r"model base \(id .*base \(2.weight differs\)"):
        load_checkpoint(run / "a")
    assert equal_states(load_checkpoint(run / "a", pretrained=tmp_path / "models" / "x"), state)
    monkeypatch.setenv("SLIMTENSORS_BASES", os.pathsep.join(["/none", str(tmp_path / "models")]))
    assert equal_states(load_checkpoint(run / "a"), state)


def test_the_same_weights_in_another_form_are_the_same_model(tmp_path, tuning):
    base = save_model(tuning.model, tmp_path / "base", preset="dense")
    first = save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base)
    shutil.rmtree(base)
    save_model(tuning.model, tmp_path / "base", preset="lossless", max_shard_size="40KB")
    assert equal_states(load_checkpoint(tmp_path / "a"), tuning.state())
    again = save_checkpoint(tuning.state(), tmp_path / "b", pretrained=base)
    assert again.manifest.pretrained.id == first.manifest.pretrained.id


@pytest.mark.parametrize("name", ["3.weight", "8.weight"])  # frozen, trained
def test_a_model_with_one_other_bit_is_refused(tmp_path, tuning, name):
    base = save_model(tuning.model, tmp_path / "base", preset="dense")
    changed = Tuning()
    tuning.train()
    save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base)
    with torch.no_grad():
        changed.model.state_dict()[name].view(torch.int32)[5] ^= 1
    shutil.rmtree(base)
    save_model(changed.model, tmp_path / "base", preset="dense")
    with pytest.raises(MissingBaseError, match=rf"{name} differs"):
        load_checkpoint(tmp_path / "a")
    with pytest.raises(MissingBaseError, match=rf"but .*base is another one: {name} differs"):
        load_checkpoint(tmp_path / "a", pretrained=base)
    assert "needs the pretrained model base" in verify_run(tmp_path).damaged["a"]


def test_another_model_as_base_is_refused(tmp_path, tuning):
    save_model(nn.Linear(3, 5), tmp_path / "base")
    with pytest.raises(MismatchError, match="is not the pretrained model of these weights: 0 of"):
        save_checkpoint(tuning.state(), tmp_path / "a", base=tmp_path / "base")
    with pytest.raises(MismatchError, match="is not the pretrained model of these weights"):
        checkpointing(tmp_path / "run", tuning.model, pretrained=tmp_path / "base")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        save_checkpoint(tuning.state(), tmp_path / "a", pretrained=tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        checkpointing(tmp_path / "run", tuning.model, pretrained=tmp_path / "none")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base"]


def test_options_that_do_not_fit_raise(tmp_path, tuning):
    base = save_model(tuning.model, tmp_path / "base")
    save_checkpoint(tuning.state(), tmp_path / "a")
    with pytest.raises(ConfigError, match="a is a checkpoint, not a model folder; pass base="):
        save_checkpoint(tuning.state(), tmp_path / "b", pretrained=tmp_path / "a")
    with pytest.raises(ConfigError, match="needs no pretrained model, but"):
        load_checkpoint(tmp_path / "a", pretrained=base)
    with pytest.raises(ConfigError, match="quantize_i8 cannot be combined"):
        save_checkpoint(tuning.state(), tmp_path / "b", pretrained=base, quantize_i8=True)


def test_deltas_of_checkpoints_need_the_model_too(tmp_path, tuning):
    base = save_model(tuning.model, tmp_path / "base")
    tuning.train()
    save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base)
    tuning.train()
    state = tuning.state()
    saved = save_checkpoint(state, tmp_path / "b", base=tmp_path / "a", pretrained=base)
    assert str(saved).startswith("b: delta from a and base, exact")
    entries = read_kinds(tmp_path / "b")
    assert entries["model.1.weight"]["from"] == ["1.weight"]
    assert "from" not in entries["model.8.weight"]
    assert equal_states(load_checkpoint(tmp_path / "b"), state)
    plain = save_checkpoint(state, tmp_path / "c", base=tmp_path / "a")
    assert plain.manifest.pretrained is None
    flatten(tmp_path / "c", tmp_path / "alone")
    shutil.rmtree(base)
    assert equal_states(load_checkpoint(tmp_path / "alone"), state)
    for name in ("b", "c"):
        with pytest.raises(MissingBaseError, match="needs the pretrained model base"):
            load_checkpoint(tmp_path / name)


@pytest.mark.parametrize("profile", ["optimizer", "all", "history"])
def test_profiles_round_trained_weights_only(tmp_path, tuning, profile):
    base = save_model(tuning.model, tmp_path / "base")
    tuning.train(3)
    saved = save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base, profile=profile)
    loaded = load_checkpoint(tmp_path / "a")["model"]
    assert all(same_bits(loaded[f"{i}.weight"], tuning.model[i].weight) for i in range(8))
    is_rounded = "model.8.weight" in saved.errors
    assert is_rounded == (profile != "optimizer")


def train_loop(tmp_path, steps, *, tuning=None, **options):
    tuning = tuning or Tuning()
    options = {"every": 2, "keep_last": 2, "keyframe_every": 3, **options}
    with checkpointing(tmp_path / "run", tuning.model, tuning.optimizer, **options) as ckpt:
        for _ in range(ckpt.start, steps):
            tuning.train()
            ckpt.step()
    return ckpt, tuning


def test_a_loop_resumes_without_naming_the_model_again(tmp_path):
    base = save_model(Tuning().model, tmp_path / "base")
    _, whole = train_loop(tmp_path, 16, pretrained=base)
    shutil.rmtree(tmp_path / "run")
    train_loop(tmp_path, 7, pretrained=base, keep_history=True)
    ckpt, resumed = train_loop(tmp_path, 16, keep_history=True)
    assert (ckpt.start, ckpt.resumed["step"]) == (6, 6)
    assert equal_states(resumed.state(), whole.state())
    points = list_checkpoints(tmp_path / "run")
    assert all(point.manifest.pretrained.name == "base" for point in points)
    assert {point.manifest.profile for point in points} == {"exact", "history"}
    assert verify_run(tmp_path / "run")
    full = sum(x.nbytes for x in whole.model.state_dict().values())
    assert all(point.manifest.bytes < full for point in points)


def test_a_loop_stops_if_the_model_is_missing_and_continues_where_it_is_now(tmp_path, capsys):
    base = save_model(Tuning().model, tmp_path / "base")
    train_loop(tmp_path, 6, pretrained=base)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*.*n*")}
    (tmp_path / "far" / "away").mkdir(parents=True)
    moved = shutil.move(base, tmp_path / "far" / "away" / "base")
    with pytest.raises(MissingBaseError, match="needs the pretrained model base"):
        train_loop(tmp_path, 8)
    assert {path: path.stat().st_mtime_ns for path in before} == before
    ckpt, _ = train_loop(tmp_path, 8, pretrained=moved)
    assert ckpt.start == 6
    assert main(["verify", str(tmp_path / "run")]) == 3
    assert "needs the pretrained model base" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "run")]) == 0  # needs no base
    assert "step-00000006 and base" in capsys.readouterr().out
    assert main(["inspect", "--json", str(tmp_path / "run")]) == 0
    found = json.loads(capsys.readouterr().out)["checkpoints"]
    assert {point["pretrained"] for point in found} == {"base"}


def test_a_model_that_vanishes_during_training_costs_space_only(tmp_path, caplog):
    base = save_model(Tuning().model, tmp_path / "base")
    tuning = Tuning()
    with checkpointing(
        tmp_path / "run", tuning.model, tuning.optimizer, every=1, base=None, pretrained=base
    ) as ckpt:
        tuning.train()
        ckpt.step()
        ckpt.wait()
        shutil.rmtree(base)
        tuning.train()
        ckpt.step()
    assert "saved in full, because the base cannot be read" in caplog.text
    assert list_checkpoints(tmp_path / "run")[-1].manifest.pretrained is None
    loaded = load_checkpoint(tmp_path / "run" / "step-00000002")["model"]
    assert all(same_bits(loaded[name], x) for name, x in tuning.model.state_dict().items())


def test_checkpoints_whose_model_is_missing_are_not_removed(tmp_path):
    base = save_model(Tuning().model, tmp_path / "base")
    train_loop(tmp_path, 6, pretrained=base)
    shutil.rmtree(base)
    points = list_checkpoints(tmp_path / "run")
    integrity = RunIntegrity(tmp_path / "run")
    assert not any(map(integrity.is_intact, points))


def test_a_killed_run_resumes_bit_for_bit(tmp_path):
    base = save_model(Tuning().model, tmp_path / "base")
    done = start_program("kill_tuning", tmp_path / "run", base)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ckpt, resumed = train_loop(tmp_path, 12)
    assert ckpt.start == 6
    whole = Tuning()
    torch.manual_seed(0)
    shutil.rmtree(tmp_path / "run")
    _, whole = train_loop(tmp_path, 12)
    assert equal_states(resumed.state(), whole.state())


class LowRank(nn.Module):
    """A linear layer with a trained low-rank update, as peft names its parts."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, x):
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def test_adapters_and_their_optimizer_are_stored_alone(tmp_path):
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))
    base = save_model(layers, tmp_path / "base", prefix="model.")
    layers.requires_grad_(False)
    inner, outer = nn.Module(), nn.Module()
    inner.model = nn.Sequential(*map(LowRank, layers))
    outer.base_model = nn.Module()
    outer.base_model.model = inner  # base_model.model.model.0.base_layer.weight, as in peft
    trained = [p for p in outer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    inner.model(torch.randn(8, 96)).square().mean().backward()
    optimizer.step()
    state = build_checkpoint(outer, optimizer)
    saved = save_checkpoint(state, tmp_path / "a", pretrained=base)
    entries = read_kinds(tmp_path / "a")
    frozen = {name: x for name, x in entries.items() if ".base_layer." in name}
    assert len(frozen) == 8
    assert {entry["as"] for entry in frozen.values()} == {"same"}
    assert all(".lora_" in name for name in saved.unmatched)
    assert len(saved.unmatched) == 8
    loaded = load_checkpoint(tmp_path / "a")
    assert equal_states(loaded, state)
    restore_checkpoint(loaded, outer, optimizer)


HINTS = ["https://example.com/x", "//server/share", "\\\\server\\share", "~/x", "a\nb", "", 3]


@pytest.mark.parametrize("hint", HINTS)
def test_a_hint_that_leads_to_another_machine_is_refused(tmp_path, tuning, hint):
    base = save_model(tuning.model, tmp_path / "base")
    save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base)
    edit_manifest(tmp_path / "a", lambda data: data["pretrained"].update(hints=[hint]))
    with pytest.raises(CorruptFileError, match="hints: expected at most 4 local paths"):
        load_checkpoint(tmp_path / "a")


def test_a_hint_to_a_model_with_other_bits_is_not_used(tmp_path, tuning):
    base = save_model(tuning.model, tmp_path / "base")
    save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base)
    secret = Tuning()
    with torch.no_grad():
        secret.model[0].weight[0, 0] = 7
    save_model(secret.model, tmp_path / "secret")
    hints = ["../secret", str(tmp_path / "secret"), "/dev/zero", str(tmp_path / "pipe")]
    os.mkfifo(tmp_path / "pipe")
    edit_manifest(tmp_path / "a", lambda data: data["pretrained"].update(hints=hints))
    shutil.rmtree(base)
    with pytest.raises(MissingBaseError, match="which was not found"):
        load_checkpoint(tmp_path / "a")


@pytest.mark.parametrize(
    ("key", "value"), [("name", "../x"), ("id", "0"), ("hints", "x"), ("hints", ["x"] * 5)]
)
def test_a_malformed_record_of_the_model_is_refused(tmp_path, tuning, key, value):
    base = save_model(tuning.model, tmp_path / "base")
    save_checkpoint(tuning.state(), tmp_path / "a", pretrained=base)
    edit_manifest(tmp_path / "a", lambda data: data["pretrained"].update({key: value}))
    with pytest.raises(CorruptFileError, match=f"{key}: expected"):
        load_checkpoint(tmp_path / "a")


def test_the_version_is_raised_only_where_a_model_is_needed(tmp_path, tuning):
    base = save_model(tuning.model, tmp_path / "base")
    versions = {}
    for name, options in {"plain": {}, "tuned": {"pretrained": base}}.items():
        save_checkpoint(tuning.state(), tmp_path / name, **options)
        versions[name] = json.loads((tmp_path / name / "checkpoint.json").read_text())["version"]
    save_checkpoint(
        {"extra": torch.ones(3), "model": tuning.state()["model"]}, tmp_path / "z", pretrained=base
    )
    assert versions == {"plain": 2, "tuned": 3}
