"""Models with many zeros, compressed as a state dict."""

import shutil
from pathlib import Path

import pytest
import torch
from models import write_llama
from safetensors.torch import load_file
from strategies import same_bits
from torch import nn

import slimtensors
from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError
from slimtensors.folder.config_json import BitmaskConfig, Sparse24BitmaskConfig, SparsityConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed_tensors"


def test_a_sparse_model_saved_by_transformers_is_restored(tmp_path):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(write_llama(tmp_path / "model", tied=True))
    compressor = ModelCompressor(sparsity_config=BitmaskConfig())
    small = tmp_path / "small"
    model.save_pretrained(small, state_dict=compressor.compress(model))
    stored = load_file(small / "model.safetensors")
    assert "model.layers.0.mlp.up_proj.bitmask" in stored
    assert "model.layers.0.mlp.up_proj.weight" not in stored
    again = ModelCompressor.from_pretrained(small)
    assert again.sparsity_config.format == "sparse-bitmask"
    assert again.sparsity_config.global_sparsity == pytest.approx(0.5, abs=0.05)
    back = again.decompress(small)
    want = model.state_dict()
    assert want.keys() - back.keys() <= {"lm_head.weight"}
    assert all(same_bits(x, want[name]) for name, x in back.items())
    try:
        _, info = AutoModelForCausalLM.from_pretrained(small, output_loading_info=True)
    except (AttributeError, ImportError):
        return
    # transformers 5.23 ignores formats that compressed-tensors has dropped, and reports that.
    assert "model.layers.0.mlp.up_proj.weight" in info["missing_keys"]


def test_unsupported_names_stay_dense_with_a_warning(caplog):
    model = nn.Module()
    model.table = nn.Parameter(torch.zeros(8, 64))
    model.layer = nn.Linear(64, 8)
    state = ModelCompressor(sparsity_config=BitmaskConfig()).compress(model)
    assert state.keys() == {"table", "layer.weight", "layer.bias"}
    assert "table: stays dense" in caplog.text


def test_two_of_four_stores_half_of_the_values(tmp_path):
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    with torch.no_grad():
        model[0].weight.view(-1, 4)[:, :2] = 0
    state = ModelCompressor(sparsity_config=Sparse24BitmaskConfig()).compress(model)
    assert state["0.compressed"].shape == (8, 32)
    slimtensors.save(state, tmp_path / "x.safetensors", preset="dense")
    with pytest.raises(ConfigError, match="not dense"):
        ModelCompressor(sparsity_config=SparsityConfig("dense")).compress(model)


@pytest.mark.parametrize(
    "file", ["0.3.3/bitmask-config", "0.8.1/bitmask-config", "0.14.0.1/24-model-config"]
)
def test_configs_of_all_releases_are_read(file, tmp_path):
    shutil.copy(GOLDEN / f"{file}.json", tmp_path / "config.json")
    found = ModelCompressor.from_pretrained(tmp_path).sparsity_config
    assert found.format == ("sparse-24-bitmask" if "24" in file else "sparse-bitmask")
    assert found.global_sparsity == 0.5
