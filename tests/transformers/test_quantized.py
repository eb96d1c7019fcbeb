"""Quantized folders through transformers: to dense weights, or to weights that run compressed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from quantized_models import IDS, config_of, frozen, logits, make, save
from safetensors.torch import load_file
from strategies import same_bits
from tiny_models import pruned, same_weights
from transformers import AutoConfig, AutoModelForCausalLM

import slimtensors
from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import BitmaskConfig
from slimtensors.folder.convert import Rewrite, convert_folder
from slimtensors.folder.quantize import quantize_folder
from slimtensors.runtime import QuantizedTensor, get_model_size_in_bytes
from slimtensors.transformers.auto import (
    SparseAutoModel,
    SparseAutoModelForCausalLM,
    SparseAutoModelForMaskedLM,
)
from slimtensors.transformers.saving import enable


def write_quantized(folder, family="llama", preset="W4A16", dialect="slim", shards=None):
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
    """Return the files that a model is saved as; reports of a command are not among them."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    found.pop("quantization_report.json", None)
    return found


def dense_weights(model):
    state = model.state_dict().items()
    return {name: x.dequantize() if isinstance(x, QuantizedTensor) else x for name, x in state}


def linear(model):
    return model.model.layers[0].self_attn.q_proj.weight


@pytest.mark.parametrize("shards", [None, "100kB"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_slim_folders_load_dense_and_are_saved_unchanged(tmp_path, family, shards):
    small = write_quantized(tmp_path, family, shards=shards)
    model, info = AutoModelForCausalLM.from_pretrained(small, output_loading_info=True)
    assert not any(info.values())
    assert same_weights(model, dense(small))
    model.save_pretrained(tmp_path / "again", max_shard_size=shards or "50GB")
    assert files(tmp_path / "again") == files(small)


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A16", "FP8_DYNAMIC", "NVFP4A16"])
def test_slim_folders_run_compressed(tmp_path, preset):
    small = write_quantized(tmp_path, preset=preset)
    want = AutoModelForCausalLM.from_pretrained(small)
    model = SparseAutoModelForCausalLM.from_pretrained(small, run_compressed=True)
    assert isinstance(linear(model), QuantizedTensor)
    assert all(same_bits(x, want.state_dict()[name]) for name, x in dense_weights(model).items())
    assert torch.allclose(logits(model), logits(want), atol=0.03)
    assert get_model_size_in_bytes(model) < 0.65 * get_model_size_in_bytes(want)
    assert model.generate(IDS, max_new_tokens=3, do_sample=False).shape[1] <= IDS.shape[1] + 3
    model.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(small)


def test_experts_are_dense_if_other_layers_run_compressed(tmp_path):
    small = write_quantized(tmp_path, "mixtral", shards="100kB")
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
    if preset == "lossless":  # the model does not know the headers of the original files
        again, before = (slimtensors.load(tmp_path / name) for name in ("again", "small"))
        assert again.keys() == before.keys()
        assert all(same_bits(again[name], x) for name, x in before.items())
    else:
        assert files(tmp_path / "again") == files(tmp_path / "small")


def test_the_config_can_request_run_compressed(tmp_path):
    small = write_quantized(tmp_path)
    config = AutoConfig.from_pretrained(small)
    config.quantization_config["run_compressed"] = True
    model = AutoModelForCausalLM.from_pretrained(small, config=config)
    assert isinstance(linear(model), QuantizedTensor)
    data = json.loads((small / "config.json").read_text())
    data["quantization_config"]["run_compressed"] = True
    (small / "config.json").write_text(json.dumps(data))
    assert isinstance(linear(AutoModelForCausalLM.from_pretrained(small)), QuantizedTensor)


def test_run_compressed_in_the_config_is_kept_when_saving(tmp_path):
    pruned(make("llama")).save_pretrained(tmp_path / "dense")
    compress_folder(tmp_path / "dense", tmp_path / "small", preset="sparse")
    config = tmp_path / "small" / "config.json"
    data = json.loads(config.read_text())
    data["quantization_config"]["run_compressed"] = True
    config.write_text(json.dumps(data))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    model.save_pretrained(tmp_path / "again")
    saved = json.loads((tmp_path / "again" / "config.json").read_text())
    assert saved["quantization_config"] == data["quantization_config"]


def test_a_smaller_shard_size_is_refused_for_quantized_weights(tmp_path):
    model = SparseAutoModelForCausalLM.from_pretrained(
        write_quantized(tmp_path, dialect="compressed-tensors")
    )
    with pytest.raises(ConfigError, match=r"max_shard_size.*model\.safetensors.*convert"):
        model.save_pretrained(tmp_path / "again", max_shard_size="20kB")
    assert not (tmp_path / "again").exists()


def test_a_model_that_runs_compressed_can_have_another_dtype(tmp_path):
    small = write_quantized(tmp_path)
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
    small = write_quantized(tmp_path)
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
    small = write_quantized(tmp_path)
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


def test_folders_that_cannot_run_compressed_are_refused(tmp_path):
    write_quantized(tmp_path)
    load = SparseAutoModelForCausalLM.from_pretrained
    with pytest.raises(ConfigError, match="is not compressed"):
        load(tmp_path / "dense", run_compressed=True)
    compress_folder(tmp_path / "dense", tmp_path / "coded", preset="lossless")
    with pytest.raises(ConfigError, match=r"no linear layer is stored.*without run_compressed"):
        load(tmp_path / "coded", run_compressed=True)
    config = AutoConfig.from_pretrained(tmp_path / "small")
    with pytest.raises(ConfigError, match="cannot be combined with config; set"):
        load(tmp_path / "small", config=config, run_compressed=True)


def save_with_compressed_tensors(folder, preset, family="llama"):
    """Write a model in the format of compressed-tensors; return its logits before that."""
    config = config_of(preset, family)
    model = frozen(family, config)
    want = logits(model)
    save(model, config, folder)
    return want


DYNAMIC = ["W8A8", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP4", "MXFP8"]
"""Presets that quantize inputs dynamically."""


@pytest.mark.parametrize(
    "preset", ["W4A16", "W4A16_ASYM", "W8A16", "FP8", "NVFP4", "NVFP4A16", "MXFP4A16", *DYNAMIC]
)
def test_folders_of_compressed_tensors_load_and_are_saved_unchanged(tmp_path, preset):
    small = tmp_path / "small"
    rounded = save_with_compressed_tensors(small, preset)
    plain = ModelCompressor.from_pretrained(small).decompress(small)
    load = SparseAutoModelForCausalLM.from_pretrained
    want, info = load(small, output_loading_info=True)
    assert not any(info.values())
    assert all(same_bits(x, want.state_dict()[name]) for name, x in plain.items())
    model = load(small, run_compressed=True)
    assert isinstance(linear(model), QuantizedTensor)
    assert all(same_bits(x, dense_weights(model)[name]) for name, x in plain.items())
    assert get_model_size_in_bytes(model) < 0.65 * get_model_size_in_bytes(want)
    reference = rounded if preset in DYNAMIC else logits(want)
    assert torch.allclose(logits(model), reference, atol=0.03)
    for loaded in (want, model):
        loaded.save_pretrained(tmp_path / "again")
        assert files(tmp_path / "again") == files(small)


@pytest.mark.parametrize("family", ["mixtral", "bert", "opt"])
def test_other_families_of_compressed_tensors_load(tmp_path, family):
    small = tmp_path / "small"
    save_with_compressed_tensors(small, "W4A16", family)
    plain = ModelCompressor.from_pretrained(small).decompress(small)
    auto = SparseAutoModelForMaskedLM if family == "bert" else SparseAutoModelForCausalLM
    want = auto.from_pretrained(small)
    want.save_pretrained(tmp_path / "dense", save_compressed=False, skip_compression_stats=True)
    stored = load_file(tmp_path / "dense" / "model.safetensors")
    assert stored.keys() == plain.keys()
    assert all(same_bits(x, plain[name]) for name, x in stored.items())
    model = auto.from_pretrained(small, run_compressed=True)
    assert torch.allclose(logits(model), logits(want), atol=0.03)
    model.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(small)


@pytest.mark.parametrize("run_compressed", [False, True])
def test_a_compressed_folder_of_compressed_tensors_loads_with_auto_classes(
    tmp_path, run_compressed
):
    small = write_quantized(tmp_path, dialect="compressed-tensors", shards="100kB")
    compress_folder(small, tmp_path / "coded", preset="lossless")
    config = AutoConfig.from_pretrained(tmp_path / "coded")
    config.quantization_config["run_compressed"] = run_compressed
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "coded", config=config)
    assert isinstance(linear(model), QuantizedTensor) == run_compressed
    want = dense(small).state_dict()
    assert all(same_bits(x, want[name]) for name, x in dense_weights(model).items())
    model.save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "coded")


def test_shards_replace_those_of_an_older_model(tmp_path):
    small = write_quantized(tmp_path, dialect="compressed-tensors", shards="100kB")
    make("llama").save_pretrained(tmp_path / "again")
    model = SparseAutoModelForCausalLM.from_pretrained(small, run_compressed=True)
    before = files(small)
    for folder in (small, tmp_path / "again"):
        model.save_pretrained(folder)
        assert files(folder) == before


def test_a_base_model_and_another_dtype_load_from_compressed_tensors(tmp_path):
    small = write_quantized(tmp_path, dialect="compressed-tensors")
    want = dense(small).model.half()
    model = SparseAutoModel.from_pretrained(small, dtype=torch.float16)
    assert same_weights(model, want)
    with pytest.raises(
        MismatchError, match=r"embed_tokens.weight not found.*save_compressed=False"
    ):
        model.save_pretrained(tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_changed_weights_are_not_quantized_again_silently(tmp_path):
    small = write_quantized(tmp_path, dialect="compressed-tensors")
    model = SparseAutoModelForCausalLM.from_pretrained(small)
    with torch.no_grad():
        linear(model)[3, 5] = 4
    with pytest.raises(MismatchError, match=r"q_proj.weight was changed.*enable\(model"):
        model.save_pretrained(tmp_path / "again")
    enable(model, preset="lossless").save_pretrained(tmp_path / "again")
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "again"), model)
    model = SparseAutoModelForCausalLM.from_pretrained(small)
    (small / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="no longer exists; pass save_compressed=False"):
        model.save_pretrained(tmp_path / "thrice")


def test_rotated_weights_are_refused(tmp_path):
    small = write_quantized(tmp_path, dialect="compressed-tensors")
    data = json.loads((small / "config.json").read_text())
    data["quantization_config"]["transform_config"] = {"config_groups": {"R1": {}}}
    (small / "config.json").write_text(json.dumps(data))
    with pytest.raises(ConfigError, match="rotated weights"):
        SparseAutoModelForCausalLM.from_pretrained(small)


LOAD_WITHOUT_PEER = Path(__file__).parent / "programs" / "load_without_peer.py"


@pytest.mark.slow
def test_compressed_tensors_need_not_be_installed(tmp_path):
    small = write_quantized(tmp_path, dialect="compressed-tensors")
    command = [sys.executable, LOAD_WITHOUT_PEER, small]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["Parameter", "QuantizedTensor"]
