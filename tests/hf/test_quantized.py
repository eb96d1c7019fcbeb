"""Quantized folders through transformers: to dense weights, or to weights that run compressed."""

import json

import pytest
import torch
from hf.tiny import pruned, same_weights
from quantized_models import IDS, config_of, logits, make
from strategies import same_bits
from transformers import AutoConfig, AutoModelForCausalLM

import slimtensors
from slimtensors.errors import ConfigError
from slimtensors.quantized_folder import Rewrite, convert_folder, quantize_folder
from slimtensors.tensors import QuantizedTensor, get_model_size_in_bytes
from slimtensors.transformers import SparseAutoModelForCausalLM, compress_folder
from slimtensors.transformers.compression import BitmaskConfig


def quantized(folder, family="llama", preset="W4A16", dialect="slim", shards=None):
    """Write a model dense and quantized; return the second folder."""
    make(family).save_pretrained(folder / "dense")
    quantize_folder(
        folder / "dense",
        folder / "small",
        config_of(preset, family),
        dialect=dialect,
        how=Rewrite(max_shard_size=shards),
    )
    return folder / "small"


def dense(folder):
    """Return the model that decoding the whole folder gives."""
    convert_folder(folder, folder.parent / "plain", to="dense")
    return AutoModelForCausalLM.from_pretrained(folder.parent / "plain")


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def linear(model):
    return model.model.layers[0].self_attn.q_proj.weight


@pytest.mark.parametrize("shards", [None, "100kB"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_folders_of_ours_load_dense_and_are_saved_as_they_were(tmp_path, family, shards):
    small = quantized(tmp_path, family, shards=shards)
    model, info = AutoModelForCausalLM.from_pretrained(small, output_loading_info=True)
    assert not any(info.values())
    assert same_weights(model, dense(small))
    model.save_pretrained(tmp_path / "again", max_shard_size=shards or "50GB")
    assert files(tmp_path / "again") == files(small)


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "NVFP4A16"])
def test_folders_of_ours_run_compressed(tmp_path, preset):
    small = quantized(tmp_path, preset=preset)
    want = AutoModelForCausalLM.from_pretrained(small)
    model = SparseAutoModelForCausalLM.from_pretrained(small, run_compressed=True)
    assert isinstance(linear(model), QuantizedTensor)
    for name, x in model.state_dict().items():
        plain = x.dequantize() if isinstance(x, QuantizedTensor) else x
        assert same_bits(plain, want.state_dict()[name])
    assert torch.allclose(logits(model), logits(want), atol=0.03)
    assert get_model_size_in_bytes(model) < 0.65 * get_model_size_in_bytes(want)
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape[1] <= IDS.shape[1] + 3
    model.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(small)


def test_experts_are_dense_where_other_layers_run_compressed(tmp_path):
    small = quantized(tmp_path, "mixtral", shards="100kB")
    want = AutoModelForCausalLM.from_pretrained(small)
    model = SparseAutoModelForCausalLM.from_pretrained(small, run_compressed=True)
    assert isinstance(linear(model), QuantizedTensor)
    assert type(model.model.layers[0].mlp.experts.down_proj) is torch.nn.Parameter
    assert torch.allclose(logits(model), logits(want), atol=0.03)
    model.save_pretrained(tmp_path / "again", max_shard_size="100kB")
    assert files(tmp_path / "again") == files(small)


@pytest.mark.parametrize("preset", ["lossless", "extreme"])
def test_sparse_and_rounded_folders_run_compressed(tmp_path, preset):
    model = pruned(make("llama"))
    model.lm_head.weight.data[:, 5:] = 0  # rows of almost nothing but zeros
    model.save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small", preset=preset)
    want = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    small = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "small", run_compressed=True)
    assert get_model_size_in_bytes(small) < 0.8 * get_model_size_in_bytes(want)
    assert torch.allclose(logits(small), logits(want), atol=0.03)
    small.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "small")


def test_the_config_can_ask_for_it_too(tmp_path):
    small = quantized(tmp_path)
    config = AutoConfig.from_pretrained(small)
    config.quantization_config["run_compressed"] = True
    model = AutoModelForCausalLM.from_pretrained(small, config=config)
    assert isinstance(linear(model), QuantizedTensor)
    data = json.loads((small / "config.json").read_text())
    data["quantization_config"]["run_compressed"] = True
    (small / "config.json").write_text(json.dumps(data))
    assert isinstance(linear(AutoModelForCausalLM.from_pretrained(small)), QuantizedTensor)


def test_a_model_that_runs_compressed_takes_another_dtype(tmp_path):
    small = quantized(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(small, dtype=torch.float32)
    model = SparseAutoModelForCausalLM.from_pretrained(
        small, run_compressed=True, dtype=torch.float32
    )
    assert torch.allclose(logits(model), logits(want), atol=1e-4)
    model.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert again.dtype is torch.float32
    assert same_weights(again, want)
    assert same_bits(linear(model.bfloat16()).dequantize(), linear(want.bfloat16()))


def test_a_model_that_runs_compressed_can_be_saved_in_any_other_way(tmp_path):
    small = quantized(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(small)
    model = SparseAutoModelForCausalLM.from_pretrained(small, run_compressed=True)
    model.save_pretrained(tmp_path / "plain", save_compressed=False)
    model.save_pretrained(tmp_path / "sparse", sparsity_config=BitmaskConfig())
    for folder in ("plain", "sparse"):
        assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / folder), want)
    kinds = {t.codec.partition("(")[0] for t in slimtensors.inspect(tmp_path / "sparse").tensors}
    assert "quantized" not in kinds


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_layers_on_the_disk_are_dense(tmp_path):
    small = quantized(tmp_path)
    want = AutoModelForCausalLM.from_pretrained(small)
    places = {"model.embed_tokens": "cpu", "model.layers.0": "disk", "model.layers.1": "cpu"}
    places |= {"model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    model = SparseAutoModelForCausalLM.from_pretrained(
        small, run_compressed=True, device_map=places, offload_folder=tmp_path / "offload"
    )
    assert isinstance(model.model.layers[1].mlp.up_proj.weight, QuantizedTensor)
    assert torch.allclose(logits(model), logits(want), atol=0.03)
    model.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(small)


def test_what_cannot_run_compressed_is_refused(tmp_path):
    quantized(tmp_path)
    load = SparseAutoModelForCausalLM.from_pretrained
    with pytest.raises(ConfigError, match="is not compressed"):
        load(tmp_path / "dense", run_compressed=True)
    compress_folder(tmp_path / "dense", tmp_path / "coded", preset="lossless")
    with pytest.raises(ConfigError, match=r"no linear layer is stored.*without run_compressed"):
        load(tmp_path / "coded", run_compressed=True)
    config = AutoConfig.from_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="together with a config; say it there"):
        load(tmp_path / "small", config=config, run_compressed=True)
