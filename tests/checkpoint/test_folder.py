"""Checkpoint folders: atomic writes, manifests, rounding on request."""

import errno
import json
import os

import pytest
import torch
from strategies import same_bits
from torch import nn
from training import Run

from slimtensors.archive.verify import verify
from slimtensors.checkpoint import Filter, build_checkpoint, load_checkpoint, save_checkpoint
from slimtensors.errors import ConfigError, CorruptFileError, FormatError, UnsupportedVersionError


@pytest.fixture(scope="module")
def state():
    run = Run(width=64)
    run.train(3)
    return build_checkpoint(*run.parts(), step=3, metrics={"loss": 0.25})


def test_a_checkpoint_folder_contains_tensors_and_json(tmp_path, state):
    saved = save_checkpoint(state, tmp_path / "deep" / "here")
    folder = tmp_path / "deep" / "here"
    assert sorted(p.name for p in folder.iterdir()) == ["checkpoint.json", "state.safetensors"]
    manifest = json.loads((folder / "checkpoint.json").read_text())
    assert (manifest["step"], manifest["profile"], manifest["metrics"]) == (
        3,
        "exact",
        {"loss": 0.25},
    )
    assert manifest["bytes"] == (folder / "state.safetensors").stat().st_size
    assert saved.manifest.kind == "full"
    assert not saved.errors
    assert not saved.kept_exact
    assert verify(folder)


def test_an_empty_folder_is_used_and_a_non_empty_one_raises(tmp_path, state):
    (tmp_path / "empty").mkdir()
    save_checkpoint(state, tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty already exists and is not empty"):
        save_checkpoint(state, tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        save_checkpoint(state, tmp_path / "file")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "file"]


def test_a_failed_save_leaves_nothing(tmp_path, state, monkeypatch):
    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        save_checkpoint(state, tmp_path / "here")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_damaged_manifest_raises(tmp_path, state):
    with pytest.raises(FileNotFoundError, match="no such checkpoint"):
        load_checkpoint(tmp_path / "none")
    with pytest.raises(FormatError, match="is not a checkpoint"):
        load_checkpoint(tmp_path)
    save_checkpoint(state, tmp_path / "here")
    path = tmp_path / "here" / "checkpoint.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "version": 99}))
    with pytest.raises(
        UnsupportedVersionError,
        match="version 99 is newer than the supported version 3; upgrade slimtensors",
    ):
        load_checkpoint(tmp_path / "here")
    for wrong in (
        "{",
        "[]",
        json.dumps({**manifest, "format": "x"}),
        json.dumps({**manifest, "a": 1}),
    ):
        path.write_text(wrong)
        with pytest.raises(CorruptFileError, match=r"checkpoint\.json"):
            load_checkpoint(tmp_path / "here")


def test_quantize_i8_rounds_only_weight_matrices_and_reports_errors(tmp_path, state):
    saved = save_checkpoint(state, tmp_path / "here", quantize_i8=True)
    back = load_checkpoint(tmp_path / "here")
    matrices = {"words.weight", "hidden.0.weight", "back.weight", "out.weight"}
    assert {name.removeprefix("model.") for name in saved.errors} == matrices
    for name, x in state["model"].items():
        y = back["model"][name]
        if name in matrices:
            error = float((y - x).norm() / x.norm())
            assert 0 < error < 0.007
            assert saved.errors[f"model.{name}"] == pytest.approx(error, rel=1e-4)
        else:
            assert same_bits(x, y)
    for index, values in state["optimizer"]["state"].items():
        assert all(same_bits(x, back["optimizer"]["state"][index][k]) for k, x in values.items())
    assert saved.manifest.profile == "int8"


def save_rounded(state, folder, **conditions):
    saved = save_checkpoint(state, folder, quantize_i8=True, lossy=Filter(**conditions))
    return {name.removeprefix("model.") for name in saved.errors}


def test_filters_select_by_name_module_role_or_function(tmp_path, state):
    assert save_rounded(
        state, tmp_path / "a", names=("model.*",), skip=("*.words.*", "*.out.*")
    ) == {
        "hidden.0.weight",
        "back.weight",
    }
    assert save_rounded(state, tmp_path / "b", roles=("embeddings",)) == {
        "words.weight",
        "out.weight",
    }
    assert save_rounded(state, tmp_path / "c", modules=("back",)) == {
        "back.weight",
        "optimizer.state.2.exp_avg",
        "optimizer.state.2.exp_avg_sq",
    }
    assert save_rounded(state, tmp_path / "d", roles=("exp_avg",)) == {
        f"optimizer.state.{i}.exp_avg" for i in range(3)
    }
    large = Filter(where=lambda info: info.spec.numel > 4000 and "weights" in info.roles)
    saved = save_checkpoint(state, tmp_path / "e", quantize_i8=True, lossy=large)
    assert set(saved.errors) == {"model.hidden.0.weight", "model.back.weight"}


def test_filters_that_match_nothing_raise(tmp_path, state):
    for conditions, message in (
        ({"names": ("modle.*",)}, r"no tensor name matches 'modle\.\*'"),
        ({"modules": ("front",)}, "no module 'front' in the checkpoint"),
        ({"roles": ("exp_avg_sqr",)}, "did you mean 'exp_avg_sq'"),
    ):
        with pytest.raises(ConfigError, match=message):
            save_rounded(state, tmp_path / "x", **conditions)
    with pytest.raises(ConfigError, match="the profile is exact"):
        save_checkpoint(state, tmp_path / "x", lossy=Filter())


def test_a_tensor_with_nan_is_kept_exact_and_reported(tmp_path):
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    with torch.no_grad():
        model[0].weight[3, 4] = float("nan")
    state = build_checkpoint(model)
    saved = save_checkpoint(state, tmp_path / "here", quantize_i8=True)
    assert saved.kept_exact == {"model.0.weight": "contains NaN or infinity; kept exact"}
    assert set(saved.errors) == {"model.1.weight"}
    assert same_bits(load_checkpoint(tmp_path / "here")["model"]["0.weight"], model[0].weight)
