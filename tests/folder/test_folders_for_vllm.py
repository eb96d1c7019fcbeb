"""Quantized folders for vLLM, checked without it: shared global scales, entropy-coded tensors."""

import json

import pytest
import torch
from safetensors.torch import load_file
from strategies import same_bits
from tiny_models import llama, mixtral
from transformers import AutoModelForCausalLM

import slimtensors
import slimtensors.transformers
from slimtensors import cli
from slimtensors.compat import ModelCompressor
from slimtensors.errors import ConfigError
from slimtensors.folder import (
    compress_folder,
    convert_folder,
    decompress_folder,
    quantize_folder,
)
from slimtensors.layerwise import quantize_model
from slimtensors.quantization import (
    QuantizationConfig,
    apply_quantization_config,
    freeze_module_quantization,
)
from slimtensors.quantization.affine import fake_quantize, find_params
from slimtensors.quantization.fused import group_fused, share_global_scale

pytestmark = pytest.mark.filterwarnings("ignore")  # of models, while they are built

NVFP4 = QuantizationConfig.preset("NVFP4A16", ignore=["lm_head", "re:.*gate$"])
W4A16 = QuantizationConfig.preset("W4A16", ignore=["lm_head"], group_size=32)


def write(model, folder, config, **options):
    model.save_pretrained(folder / "dense")
    quantize_folder(folder / "dense", folder / "out", config, **options)
    return load_file(folder / "out" / "model.safetensors")


def test_layers_of_the_same_module_that_vllm_fuses_are_grouped():
    names = ["q_proj", "o_proj", "k_proj", "v_proj"]
    layers = [f"layers.{i}.attn.{name}" for i in range(2) for name in names]
    experts = [f"mlp.experts.{i}.{name}" for i in range(2) for name in ("w1", "w2", "w3")]
    assert group_fused([*layers, *experts, "mlp.up_proj"]) == [
        ["layers.0.attn.q_proj", "layers.0.attn.k_proj", "layers.0.attn.v_proj"],
        ["layers.1.attn.q_proj", "layers.1.attn.k_proj", "layers.1.attn.v_proj"],
        ["mlp.experts.0.w1", "mlp.experts.0.w3"],
        ["mlp.experts.1.w1", "mlp.experts.1.w3"],
    ]


@pytest.mark.parametrize("make", [llama, mixtral])
@pytest.mark.parametrize("options", [{}, {"coded": True}], ids=["plain", "coded"])
def test_fused_layers_share_the_global_scale(tmp_path, make, options):
    write(make(), tmp_path, NVFP4, **options)
    convert_folder(tmp_path / "out", tmp_path / "rounded", to="dense")
    stored, dense, rounded = (
        slimtensors.load(tmp_path / name) for name in ("out", "dense", "rounded")
    )
    scales = {name: x for name, x in stored.items() if name.endswith(".weight_global_scale")}
    fused = group_fused(name.removesuffix(".weight_global_scale") for name in scales)
    assert len(fused) == (4 if make is llama else 2)  # experts of Mixtral stay dense
    assert len({float(x) for x in scales.values()}) > len(fused)  # others have their own
    args = NVFP4.config_groups["group_0"].weights
    for group in fused:
        weights = {f"{layer}.weight": dense[f"{layer}.weight"] for layer in group}
        shared = share_global_scale(weights.values())
        assert all(same_bits(scales[f"{layer}.weight_global_scale"], shared) for layer in group)
        for name, weight in weights.items():
            params = find_params(weight, args, global_scale=shared)
            assert same_bits(rounded[name], fake_quantize(weight, params, args))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_fused_layers_of_a_model_in_memory_share_the_global_scale(method, caplog):
    model = llama()
    dense = {name: x.detach().clone() for name, x in model.named_parameters()}
    tokens = torch.arange(96).view(4, 24)
    quantize_model(model, NVFP4, calibration=[{"input_ids": tokens}], method=method)
    state = ModelCompressor(quantization_config=NVFP4).compress(model)
    assert "vLLM" not in caplog.text
    scales = {name: x for name, x in state.items() if name.endswith(".weight_global_scale")}
    fused = group_fused(name.removesuffix(".weight_global_scale") for name in scales)
    assert len(fused) == 4
    for group in fused:
        expected = share_global_scale(dense[f"{layer}.weight"] for layer in group)
        found = [scales[f"{layer}.weight_global_scale"] for layer in group]
        assert all(same_bits(x.reshape(1), expected) for x in found)


def test_fused_layers_that_were_frozen_one_by_one_are_reported(caplog):
    model = llama()
    apply_quantization_config(model, NVFP4)
    model.apply(freeze_module_quantization)
    ModelCompressor(quantization_config=NVFP4).compress(model)
    assert "global scales of 10 layers that vLLM fuses differ" in caplog.text


def test_scales_of_the_slim_dialect_are_reported_when_it_is_converted(tmp_path, caplog):
    llama().save_pretrained(tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "slim", NVFP4, dialect="slim")
    assert "vLLM" not in caplog.text
    convert_folder(tmp_path / "slim", tmp_path / "out", to="compressed-tensors")
    assert "slim: global scales of 10 layers that vLLM fuses differ" in caplog.text


@pytest.mark.parametrize("shards", [None, "100kB"])
@pytest.mark.parametrize("scheme", ["W4A16", "W8A8", "FP8_DYNAMIC"])
def test_a_coded_folder_contains_the_same_tensors(tmp_path, scheme, shards):
    config = QuantizationConfig.preset(
        scheme, ignore=["lm_head"], group_size=32 if scheme == "W4A16" else None
    )
    plain = write(llama(), tmp_path, config)
    how = slimtensors.folder.FolderOptions(max_shard_size=shards)
    quantize_folder(tmp_path / "dense", tmp_path / "coded", config, coded=True, how=how)
    coded = slimtensors.load(tmp_path / "coded")
    assert coded.keys() == plain.keys()
    assert all(same_bits(coded[name], x) for name, x in plain.items())
    decompress_folder(tmp_path / "coded", tmp_path / "again")
    read = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "again")]
    assert read[0] == read[1]
    assert read[0]["quantization_config"]["quant_method"] == "compressed-tensors"


def test_the_command_writes_what_two_commands_would(tmp_path, capsys):
    llama().save_pretrained(tmp_path / "dense")
    dense, options = str(tmp_path / "dense"), ["--quantize", "W4A16", "--group-size", "32"]
    assert cli.main(["compress", dense, *options, "-o", str(tmp_path / "w4")]) == 0
    compress_folder(tmp_path / "w4", tmp_path / "two")
    command = ["compress", dense, *options, "--for", "vllm", "-o", str(tmp_path / "one")]
    assert cli.main(command) == 0
    one, two = (slimtensors.load(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    assert all(same_bits(one[name], x) for name, x in two.items())
    sections = [
        json.loads((tmp_path / name / "config.json").read_text())["quantization_config"]
        for name in ("one", "two")
    ]
    assert sections[0]["before"] == sections[1]["before"]


def test_a_coded_folder_runs_in_transformers_like_the_plain_one(tmp_path):
    write(llama(), tmp_path, W4A16)
    quantize_folder(tmp_path / "dense", tmp_path / "coded", W4A16, coded=True)
    tokens = torch.arange(12)[None]
    answers = []
    for name in ("out", "coded"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()
        with torch.no_grad():
            answers.append(model(tokens).logits)
    assert torch.equal(*answers)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--for", "vllm"], "--for vllm requires --quantize"),
        (["--for", "vllm", "--quantize", "W8A8", "--dialect", "slim"], "--for vllm requires the"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, capsys, words, message):
    llama().save_pretrained(tmp_path / "dense")
    command = ["compress", str(tmp_path / "dense"), *words, "-o", str(tmp_path / "out")]
    assert cli.main(command) == 2
    assert message in capsys.readouterr().err


def test_coded_is_refused_for_the_slim_dialect(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    with pytest.raises(ConfigError, match="coded requires the dialect compressed-tensors"):
        quantize_folder(tmp_path / "dense", tmp_path / "out", W4A16, dialect="slim", coded=True)
