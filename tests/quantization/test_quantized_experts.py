"""Stacked experts: quantized as a stack, stored as the layers of checkpoints."""

import pytest
import torch
from quantized_models import make
from strategies import same_bits
from torch import nn

from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    compress_quantized_weights,
)
from slimtensors.quantization.affine import fake_quantize, find_params

PER_TENSOR = QuantizationArgs(type="float")
BLOCKS = QuantizationArgs(type="float", strategy="block", block_structure=[32, 64])
WEIGHTS = {
    "tensor": PER_TENSOR,
    "block": BLOCKS,
    **{
        name: QuantizationScheme.preset(name).weights
        for name in ("W4A16_ASYM", "W8A8", "NVFP4A16", "MXFP4A16", "MXFP8A16")
    },
}


def config(weights, *targets, **more):
    groups = {"g": QuantizationScheme(targets or ["Linear"], weights=weights, **more)}
    return QuantizationConfig(
        groups, ignore=["lm_head"], quantization_status=QuantizationStatus.FROZEN
    )


@pytest.mark.parametrize("name", sorted(WEIGHTS))
@pytest.mark.parametrize("compressed", [False, True])
def test_each_expert_is_stored_as_a_separate_layer(name, compressed):
    from transformers.core_model_loading import revert_weight_conversion

    model, dense = make("mixtral"), make("mixtral")
    settings = config(WEIGHTS[name])
    apply_quantization_config(model, settings)
    for parameter in ("gate_up_proj", "down_proj"):
        before = dense.get_parameter(f"model.layers.1.mlp.experts.{parameter}").detach()
        after = model.get_parameter(f"model.layers.1.mlp.experts.{parameter}").detach()
        args = WEIGHTS[name]
        assert same_bits(after, fake_quantize(before, find_params(before, args), args))
    want = revert_weight_conversion(model, dict(model.state_dict()))
    if compressed:
        model.apply(compress_quantized_weights)
    compressor = ModelCompressor(settings)
    have = compressor.decompress(compressor.compress(model))
    experts = [name for name in want if "experts" in name]
    assert len(experts) == 2 * 4 * 3
    assert all(same_bits(have[name], want[name]) for name in experts)
    section = model.config.quantization_config
    assert "model.layers.1.block_sparse_moe.gate" in section["ignore"]


def test_blocks_across_two_layers_raise():
    model = make("mixtral")
    args = QuantizationArgs(type="float", strategy="block", block_structure=[96, 64])
    apply_quantization_config(model, config(args))
    with pytest.raises(ConfigError, match="do not divide"):
        ModelCompressor(config(args)).compress(model)


def test_targets_of_experts_match_their_names_in_checkpoints():
    model = make("mixtral")
    settings = config(PER_TENSOR, "MixtralExperts")
    apply_quantization_config(model, settings)
    compressor = ModelCompressor(settings)
    state = compressor.compress(model)
    written = QuantizationConfig.from_dict(model.config.quantization_config)
    assert written.config_groups["g"].targets == [
        r"re:model\.layers\.0\.block_sparse_moe\.experts\..*",
        r"re:model\.layers\.1\.block_sparse_moe\.experts\..*",
    ]
    dense = ModelCompressor(written).decompress(state)
    assert "model.layers.0.block_sparse_moe.experts.3.w2.weight" in dense


def test_static_activations_of_stacked_experts_raise_and_dynamic_ones_are_reported():
    static = config(PER_TENSOR, input_activations=PER_TENSOR)
    static.quantization_status = QuantizationStatus.CALIBRATION
    with pytest.raises(ConfigError, match=r"mlp\.experts: activations inside"):
        apply_quantization_config(make("mixtral"), static)
    tokens = QuantizationArgs(strategy="token", dynamic=True)
    report = apply_quantization_config(
        make("mixtral"), config(WEIGHTS["W8A8"], input_activations=tokens)
    )
    assert len([note for note in report.notes if "are not quantized" in note]) == 2
    assert len([note for note in report.notes if "transformers cannot load" in note]) == 2


class ToyExperts(nn.Module):
    """Transposed stacks in a model that is not from transformers."""

    is_transposed = True

    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 16, 8))

    def forward(self, x):
        return x @ self.up


@torch.no_grad()
def test_stacks_of_other_models_are_stored_expert_by_expert():
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": ToyExperts()})
    before = model["experts"].up.clone()
    args = QuantizationArgs(num_bits=4, strategy="channel")
    settings = config(args)
    settings.ignore = []
    apply_quantization_config(model, settings)
    matrix = before.transpose(-1, -2).contiguous()
    want = fake_quantize(matrix, find_params(matrix, args), args)
    assert torch.equal(model["experts"].up, want.transpose(-1, -2))
    model.apply(compress_quantized_weights)
    x = torch.randn(2, 16)
    assert torch.allclose(model["experts"](x), x @ want.transpose(-1, -2))
    dense = ModelCompressor(settings).decompress(ModelCompressor(settings).compress(model))
    assert dense.keys() == {f"experts.{i}.up.weight" for i in range(3)}
    assert all(same_bits(dense[f"experts.{i}.up.weight"], want[i]) for i in range(3))
