"""Models quantized here run in transformers with compressed-tensors, and vice versa."""

import pytest
import torch
from quantized_models import (
    CONFIGS,
    IDS,
    config_of,
    frozen,
    loaded_by_them,
    logits,
    make,
    save,
)
from safetensors.torch import load_file

from slimtensors import ModelCompressor
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    compress_quantized_weights,
)
from slimtensors.quantization.scheme import PRESETS

theirs = pytest.importorskip("compressed_tensors.quantization")

pytestmark = [
    pytest.mark.interop,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # of packages that are not ours
]


@pytest.fixture(autouse=True)
def _without_onednn():
    """Disable oneDNN: its bf16 kernels use instructions that some virtual machines only claim."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


SIMILAR = {
    *{"UNQUANTIZED", "INT8", "W4AFP8", "MXFP4XFP8", "W2A16", "W5A16", "W7A16"},
    *(f"W{bits}A{rest}" for bits in range(2, 8) for rest in (4, 8)),
}
"""Presets that are covered by others."""

BY_FAMILY = [
    *[("llama", preset) for preset in sorted(PRESETS.keys() - SIMILAR)],
    *[("opt", preset) for preset in ("W4A16_ASYM", "W8A16", "FP8")],
    *[("bert", preset) for preset in ("W4A16", "W8A8", "NVFP4")],
    *[("mixtral", preset) for preset in ("W4A16", "W3A16", "FP8_DYNAMIC")],
]


@pytest.mark.parametrize(("family", "preset"), BY_FAMILY)
def test_our_models_give_the_same_outputs_in_transformers(family, preset, tmp_path):
    config = config_of(preset, family)
    model = frozen(family, config)
    want = logits(model)
    assert not torch.equal(want, logits(make(family)))
    model.apply(compress_quantized_weights)
    assert torch.equal(logits(model), want)
    save(model, config, tmp_path)
    assert torch.equal(logits(loaded_by_them(family, tmp_path)), want)


def test_flattened_tokens_share_a_scale_in_transformers_only(tmp_path):
    """OPT flattens its tokens; stored tensors are equal, and vLLM uses a scale per token too."""
    config = config_of("W8A8", "opt")
    model = frozen("opt", config)
    save(model, config, tmp_path)
    have, want = logits(loaded_by_them("opt", tmp_path)), logits(model)
    assert not torch.equal(have, want)
    assert (have - want).abs().max() < 0.05 * want.abs().max()


def test_mixed_precision_gives_the_same_outputs_in_transformers(tmp_path):
    groups = {
        "b": QuantizationScheme.preset("W8A8", ["Linear"]),
        "a": QuantizationScheme.preset("W4A16", ["re:.*down_proj", "model.layers.0.mlp.up_proj"]),
    }
    config = QuantizationConfig(groups, ignore=["lm_head"])
    model = frozen("llama", config)
    want = logits(model)
    save(model, config, tmp_path)
    stored = ModelCompressor.from_pretrained(tmp_path)
    assert stored.quantization_config.format == "mixed-precision"
    assert stored.quantization_config.config_groups["a"].targets == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.mlp.up_proj",
        "model.layers.1.mlp.down_proj",
    ]
    assert torch.equal(logits(loaded_by_them("llama", tmp_path)), want)
    again = make("llama")
    stored.restore(again, tmp_path)
    assert torch.equal(logits(again), want)


@pytest.mark.parametrize("shared", ["tensor", "attn_head"])
def test_quantized_cache_gives_the_same_outputs_in_transformers(shared, tmp_path):
    kv = QuantizationArgs(type="float", strategy=shared)
    config = config_of("FP8_DYNAMIC", kv_cache_scheme=kv)
    model = frozen("llama", config)
    want = logits(model)
    assert not torch.equal(want, logits(frozen("llama", config_of("FP8_DYNAMIC"))))
    save(model, config, tmp_path)
    assert "model.layers.1.self_attn.v_scale" in load_file(tmp_path / "model.safetensors")
    assert torch.equal(logits(loaded_by_them("llama", tmp_path)), want)
    again = make("llama")
    ModelCompressor.from_pretrained(tmp_path).restore(again, tmp_path)
    assert torch.equal(logits(again), want)


def quantized_by_them(family, preset, folder):
    """Write a folder with compressed-tensors alone, with scales from the ranges of weights."""
    from compressed_tensors.compressors import ModelCompressor as Theirs
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    model = make(family)
    scheme = theirs.preset_name_to_scheme(preset, ["Linear"])
    ignore = config_of(preset, family).ignore
    config = theirs.QuantizationConfig(config_groups={"group_0": scheme}, ignore=ignore)
    theirs.apply_quantization_config(model, config)
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is None:
            continue
        args, weight = scheme.weights, module.weight.data
        rows = weight if args.group_size is None else weight.unflatten(-1, (-1, args.group_size))
        over = () if args.strategy == "tensor" else -1
        keep = args.strategy == "channel"
        ends = rows.amin(over, keepdim=keep), rows.amax(over, keepdim=keep)
        whole = None
        if args.strategy == "tensor_group":
            whole = generate_gparam(weight.amin(), weight.amax())
            module.weight_global_scale.data.copy_(whole)
        scale, zero = calculate_qparams(*ends, args, global_scale=whole)
        module.weight_scale.data.copy_(scale)
        module.weight_zero_point.data.copy_(zero)
        if hasattr(module, "input_scale"):
            module.input_scale.data.fill_(0.01)
    compressor = Theirs.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)


@pytest.mark.parametrize(
    ("family", "preset"),
    [
        *[("llama", x) for x in ("W4A16", "W5A16", "W4A16_ASYM", "W8A8", "FP8", "FP8_DYNAMIC")],
        *[("llama", x) for x in ("NVFP4A16", "MXFP4", "MXFP8A16")],
        *[("opt", "W4A16"), ("bert", "W8A8")],
    ],
)
def test_their_models_give_the_same_outputs_here(family, preset, tmp_path):
    quantized_by_them(family, preset, tmp_path)
    want = logits(loaded_by_them(family, tmp_path))
    compressor = ModelCompressor.from_pretrained(tmp_path)
    model = make(family)
    with torch.no_grad():
        for x in model.parameters():
            x.normal_()
    compressor.restore(model, tmp_path)
    assert torch.equal(logits(model), want)
    dense = compressor.decompress(tmp_path)
    for name, x in model.state_dict().items():
        assert name not in dense or torch.equal(dense[name], x)


def test_dense_tensors_of_a_mixture_of_experts_load(tmp_path):
    config = config_of("W4A16", "mixtral")
    model = frozen("mixtral", config)
    save(model, config, tmp_path)
    dense = ModelCompressor.from_pretrained(tmp_path).decompress(tmp_path)
    again = type(model).from_pretrained(None, config=CONFIGS["mixtral"], state_dict=dense)
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, logits(model))
