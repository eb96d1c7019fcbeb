"""Conversion between model folders and distributed checkpoints."""

import json

import pytest
import torch
from checkpoint.distributed.one import SINGLE, load, save, state
from safetensors.torch import load_file, save_file
from strategies import same_bits, same_tensors

import slimtensors
from slimtensors.checkpoint.distributed import consolidate, distribute
from slimtensors.errors import ConfigError

pytestmark = pytest.mark.filterwarnings(SINGLE)


@pytest.fixture
def model():
    g = torch.Generator().manual_seed(0)
    return {f"layer.{i}.weight": torch.randn(900, 700, generator=g) for i in range(3)} | {
        "norm": torch.ones(7).bfloat16(),
        "one": torch.tensor(3.0),
        "none": torch.zeros(0, 4),
    }


def test_a_model_folder_round_trips(model, tmp_path):
    source = tmp_path / "source"
    slimtensors.save(model, source, preset="dense", max_shard_size="3MB")
    (source / "config.json").write_text('{"model_type": "llama"}')
    distribute(source, tmp_path / "many")
    out = load(tmp_path / "many", {"model": model})
    assert same_tensors(out["model"], model)
    summary = consolidate(
        tmp_path / "many",
        tmp_path / "back",
        config=source / "config.json",
        max_shard_size="3MB",
    )
    index = json.loads((tmp_path / "back" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == model.keys()
    assert len(summary.files) == len(set(index["weight_map"].values())) > 1
    assert (tmp_path / "back" / "config.json").read_text() == '{"model_type": "llama"}'
    found = {k: x for file in summary.files for k, x in load_file(file).items()}
    assert all(same_bits(found[name], x) for name, x in model.items())


def test_consolidate_writes_only_the_model(tmp_path):
    save(state(), tmp_path / "a")
    consolidate(tmp_path / "a", tmp_path / "hf", preset="lossless")
    assert same_tensors(slimtensors.load(tmp_path / "hf"), state()["model"])
    with pytest.raises(ConfigError, match="no tensors under 'modle'; found model, optim"):
        consolidate(tmp_path / "a", tmp_path / "none", key="modle")
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        consolidate(tmp_path / "a", tmp_path / "hf")


def test_consolidate_ignores_the_key_of_a_flat_state(model, tmp_path):
    save(model, tmp_path / "a")
    consolidate(tmp_path / "a", tmp_path / "hf")
    assert same_tensors(slimtensors.load(tmp_path / "hf"), model)


def test_consolidate_raises_if_the_key_is_missing(model, tmp_path):
    save({"net": model, "count": torch.tensor(3)}, tmp_path / "a")
    with pytest.raises(ConfigError, match="no tensors under 'model'; found count, net"):
        consolidate(tmp_path / "a", tmp_path / "hf")


def test_consolidate_accepts_a_nested_key(model, tmp_path):
    save({"app": {"model": model, "optim": {"m": torch.ones(3)}}}, tmp_path / "a")
    consolidate(tmp_path / "a", tmp_path / "hf", key="app.model")
    assert same_tensors(slimtensors.load(tmp_path / "hf"), model)


def test_consolidate_warns_about_values_that_are_not_tensors(model, tmp_path, caplog):
    save({"model": {**model, "_extra_state": {"scale": 2}}, "step": 3}, tmp_path / "a")
    consolidate(tmp_path / "a", tmp_path / "hf")
    warnings = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert warnings[0].endswith("values left out, not tensors: model._extra_state.scale")


def test_consolidate_describes_a_coded_folder_in_its_config(model, tmp_path):
    save({"model": model}, tmp_path / "a")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    options = {"config": tmp_path / "config.json"}
    consolidate(tmp_path / "a", tmp_path / "slim", preset="lossless", **options)
    config = json.loads((tmp_path / "slim" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "slimtensors"
    options["config"] = tmp_path / "slim" / "config.json"
    consolidate(tmp_path / "a", tmp_path / "dense", **options)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert config == {"model_type": "llama"}


def test_distribute_overwrites_an_older_checkpoint_on_request(model, tmp_path):
    save_file(model, tmp_path / "model.safetensors")
    save(state(), tmp_path / "a")
    with pytest.raises(ConfigError, match="already exists and is not empty"):
        distribute(tmp_path / "model.safetensors", tmp_path / "a")
    distribute(tmp_path / "model.safetensors", tmp_path / "a", overwrite=True)
    assert same_tensors(load(tmp_path / "a", {"model": model})["model"], model)
