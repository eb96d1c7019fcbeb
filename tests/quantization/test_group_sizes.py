"""The default group size falls back to one that fits; a chosen one does not."""

import json

import pytest
import torch
from quantized_models import CONFIGS
from strategies import same_bits
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError
from slimtensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    freeze_module_quantization,
    quantize_model,
)
from slimtensors.quantization.group_sizes import (
    LayerColumns,
    choose_group_size,
    find_targets,
    fit_group_sizes,
)
from slimtensors.quantization.state import get_quantization
from slimtensors.quantization.targets import find_group

SMALLER = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


@pytest.mark.parametrize(
    ("columns", "size"),
    [(4096, 128), (576, 64), (96, 32), (128, 128), (200, 100), (48, -1), (16, -1), (257, -1)],
)
def test_a_group_size_divides_the_columns(columns, size):
    assert choose_group_size(columns, 128) == size


def test_a_group_for_each_size_has_targets_that_match_no_other_layer():
    layers = [
        LayerColumns(f"model.layers.{i}.{name}", "group_0", [columns])
        for i in range(3)
        for name, columns in (("q_proj", 576), ("k_proj", 576), ("down_proj", 1536))
    ]
    layers += [LayerColumns("lm_head", None, [576]), LayerColumns("head.dense", "group_0", [96])]
    fitted = fit_group_sizes(QuantizationConfig.preset("W4A16"), layers)
    groups = fitted.config.config_groups
    assert {name: scheme.weights.group_size for name, scheme in groups.items()} == {
        "group_0": 128,
        "group_1": 64,
        "group_2": 32,
    }
    assert groups["group_2"].targets == ["head.dense"]
    for layer in layers:
        matching = [
            name
            for name, scheme in groups.items()
            if find_group({name: scheme}, (), layer.name, ["Linear"])
        ]
        assert len(matching) == (layer.group is not None), layer
        for base in {layer.name, layer.name.removeprefix("model.")}:
            assert find_group(groups, (), base, ["Linear"]) == next(iter(matching), None)
    assert fitted.notes == [
        "group size 32 instead of 128: 1 layer with 96 columns",
        "group size 64 instead of 128: 6 layers with 576 columns",
    ]


def test_patterns_match_no_layer_of_another_tower():
    towers = [f"{tower}.layers.{i}.fc" for tower in ("text", "vision") for i in range(2)]
    names = [name for name in towers if name.startswith("text")]
    assert find_targets(names, towers) == [r"re:(.*\.)?text\.layers\.[0-9]+\.fc$"]
    assert find_targets(names[:1], towers) == names[:1]


def test_all_experts_get_one_size():
    layers = [
        LayerColumns("layers.0.mlp.experts.0.up", "group_0", [256]),
        LayerColumns("layers.0.mlp.experts.0.down", "group_0", [192]),
        LayerColumns("layers.0.attention", "group_0", [256]),
    ]
    fitted = fit_group_sizes(QuantizationConfig.preset("W4A16"), layers)
    assert {x.name: x.group_size for x in fitted.smaller} == {
        "layers.0.mlp.experts.0.up": 64,
        "layers.0.mlp.experts.0.down": 64,
    }


@pytest.mark.parametrize("preset", ["W8A8", "NVFP4A16", "MXFP4A16", "FP8_BLOCK", "UNQUANTIZED"])
def test_only_presets_with_free_groups_adapt(preset):
    assert not QuantizationScheme.preset(preset).fits_columns
    assert QuantizationScheme.preset("W4A16").fits_columns
    assert not QuantizationScheme.preset("W4A16", group_size=128).fits_columns


def test_the_choice_is_not_stored():
    scheme = QuantizationScheme.preset("W4A16")
    assert "fits_columns" not in scheme.to_dict()
    read = QuantizationScheme.from_dict(scheme.to_dict())
    assert read == scheme
    assert not read.fits_columns
    with pytest.raises(ConfigError, match="unknown key 'fits_columns'"):
        QuantizationScheme.from_dict(scheme.to_dict() | {"fits_columns": True})


def test_a_chosen_group_size_that_does_not_fit_raises_with_all_layers():
    model = nn.Sequential(nn.Linear(576, 4), nn.Linear(576, 4), nn.Linear(128, 4))
    config = QuantizationConfig.preset("W4A16", group_size=128)
    with pytest.raises(ConfigError) as error:
        apply_quantization_config(model, config)
    assert str(error.value) == (
        "0, 1: 576 columns are not divisible by group_size 128; group sizes that fit: 96, 72, 64,"
        " 48, 36, 32, 24, 18, 16, channel"
    )


def llama():
    torch.manual_seed(0)
    data = CONFIGS["llama"].to_dict() | {"hidden_size": 192, "head_dim": 48}
    return AutoModelForCausalLM.from_config(LlamaConfig(**data), dtype=torch.bfloat16).eval()


def read_sizes(model):
    states = {name: get_quantization(module) for name, module in model.named_modules()}
    return {
        name.rpartition(".")[2]: state.plan.weight_args.group_size
        for name, state in states.items()
        if state is not None
    }


def test_a_model_in_memory_reports_and_stores_the_group_sizes(tmp_path):
    model = llama()
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    report = apply_quantization_config(model, config)
    model.apply(freeze_module_quantization)
    assert report.notes == ["group size 64 instead of 128: 12 layers with 192 columns"]
    assert read_sizes(model) == {"down_proj": 128} | dict.fromkeys(SMALLER, 64)
    assert config == QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    compressor = ModelCompressor(config)
    state = compressor.compress(model)
    model.save_pretrained(tmp_path, state_dict=dict(state))
    groups = json.loads((tmp_path / "config.json").read_text())["quantization_config"][
        "config_groups"
    ]
    assert {name: group["weights"]["group_size"] for name, group in groups.items()} == {
        "group_0": 128,
        "group_1": 64,
    }
    stored = ModelCompressor.from_pretrained(tmp_path).decompress(tmp_path)
    dense = compressor.decompress(state)
    for name, x in model.state_dict().items():
        assert same_bits(stored[name], x), name
        assert same_bits(dense[name], x), name
    restored = llama()
    compressor.restore(restored, state)
    assert read_sizes(restored) == read_sizes(model)


def test_gptq_uses_the_group_sizes():
    model = llama()
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    ids = torch.arange(64).view(2, 32)
    report = quantize_model(model, config, calibration=[{"input_ids": ids}])
    assert "group size 64 instead of 128: 12 layers with 192 columns" in report.notes
    params = report.results["model.layers.0.mlp.up_proj"].params
    assert params.scale.shape == (256, 3)
