"""Models quantized here and by compressed-tensors 0.20: same outputs, same tensors, same config."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategies import aligned, same_bits, same_results
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig

import slimtensors
from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError, StatusError
from slimtensors.folder import quantize_folder
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
    apply_quantization_status,
    compress_quantized_weights,
    decompress_quantized_weights,
    disable_quantization,
    enable_quantization,
    freeze_module_quantization,
    is_model_quantized,
    is_module_quantized,
    load_pretrained_quantization_parameters,
)
from slimtensors.quantization.scheme import PRESETS

theirs = pytest.importorskip("compressed_tensors.quantization")
from compressed_tensors.compressors import ModelCompressor as TheirCompressor  # noqa: E402
from compressed_tensors.quantization import utils as their_utils  # noqa: E402

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore"),  # of packages that are not ours
]

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed_tensors"
IDS = torch.arange(24).view(2, 12) * 7 % 64
FP8 = {"num_bits": 8, "type": "float"}
NVFP4 = {"strategy": "tensor_group", "scale_dtype": torch.float8_e4m3fn}


@pytest.fixture(autouse=True)
def _without_onednn():
    """Disable oneDNN: its bf16 kernels use instructions that some virtual machines only claim."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


def make(attention="sdpa"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        attn_implementation=attention,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@torch.no_grad()
def logits(model):
    return aligned(model)(IDS).logits


def config_of(preset, **more):
    scheme = QuantizationScheme.preset(preset)
    return QuantizationConfig({"group_0": scheme}, ignore=["lm_head"], **more)


@torch.no_grad()
def freeze(model, config):
    config.quantization_status = QuantizationStatus.CALIBRATION
    apply_quantization_config(model, config)
    model(IDS)
    model.apply(freeze_module_quantization)
    return model


def apply_theirs(model, config, ours=None):
    """Apply a config by compressed-tensors, with scales that it computes from the weights.

    Static scales of activations, which it cannot observe, are those of our model.
    """
    fields = json.loads(config.model_dump_json())
    their_config = theirs.QuantizationConfig.model_validate(fields)
    theirs.apply_quantization_config(model, their_config, show_progress=False)
    for name, module in model.named_modules():
        scheme = getattr(module, "quantization_scheme", None)
        if not their_utils.is_module_quantized(module):
            continue
        if scheme.weights is not None:
            set_weight_params(module, scheme.weights)
        if ours is not None:
            state = ours.get_submodule(name).quantization
            for key, parameter in module.named_parameters(recurse=False):
                if not key.startswith("weight") and key.endswith("scale"):
                    parameter.data.copy_(getattr(state, key))
    return model


def set_weight_params(module, args):
    weight = module.weight.data
    match args.strategy:
        case "tensor":
            low, high = weight.aminmax()
        case "channel":
            low, high = weight.aminmax(dim=-1, keepdim=True)
        case "block":
            rows, columns = (-(-n // 128) for n in weight.shape)
            blocks = weight.reshape(rows, -1, columns, 128)
            low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
        case _:
            low, high = weight.unflatten(-1, (-1, args.group_size)).aminmax(dim=-1)
    divisor = None
    if args.strategy == "tensor_group":
        divisor = their_utils.generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data.copy_(divisor)
    scale, zero = their_utils.calculate_qparams(low, high, args, global_scale=divisor)
    module.weight_scale.data.copy_(scale)
    module.weight_zero_point.data.copy_(zero)


def save_theirs(model, folder):
    compressor = TheirCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    state = dict(model.state_dict())
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return state


def read_section(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def assert_same_tensors(have, want):
    assert have.keys() == want.keys()
    for name, x in want.items():
        assert same_bits(have[name], x), name


@pytest.mark.parametrize("preset", sorted(PRESETS))
def test_each_preset_gives_their_outputs_tensors_and_config(preset, tmp_path):
    config = config_of(preset)
    ours = freeze(make(), config)
    model = apply_theirs(make(), config, ours)
    assert torch.equal(logits(ours), logits(model))
    if preset == "UNQUANTIZED":  # nothing to compress: theirs writes no config
        state = ModelCompressor(config).compress(ours)
        assert_same_tensors(state, model.state_dict())
        ours.save_pretrained(tmp_path, state_dict=dict(state))
    else:
        want = save_theirs(model, tmp_path / "theirs")
        ours.apply(compress_quantized_weights)
        state = ModelCompressor(config).compress(ours)
        assert_same_tensors(state, want)
        ours.save_pretrained(tmp_path, state_dict=dict(state))
        section = read_section(tmp_path)
        assert section == read_section(tmp_path / "theirs")
    if preset == "W4A16_ASYM":  # transformers 5.23 refuses packed zero points, also of theirs
        loaded = make()
        ModelCompressor.from_pretrained(tmp_path).restore(loaded, tmp_path / "theirs")
    else:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(logits(loaded), logits(ours))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("strategy", ["tensor", "attn_head"])
@pytest.mark.parametrize("target", ["LlamaAttention", "re:.*self_attn$"])
def test_an_attention_target_quantizes_queries_keys_and_values(
    attention, strategy, target, tmp_path
):
    args = QuantizationArgs(**FP8, strategy=strategy)
    groups = {
        "group_0": QuantizationScheme.preset("FP8_DYNAMIC"),
        "group_1": QuantizationScheme((target,), input_activations=args),
    }
    config = QuantizationConfig(groups, ignore=["lm_head"])
    ours = freeze(make(attention), config)
    dense = freeze(make(attention), config_of("FP8_DYNAMIC"))
    cache = freeze(make(attention), config_of("FP8_DYNAMIC", kv_cache_scheme=args))
    assert not torch.equal(logits(ours), logits(dense))
    assert not torch.equal(logits(ours), logits(cache))
    state = ModelCompressor(config).compress(ours)
    ours.save_pretrained(tmp_path, state_dict=dict(state))
    model = apply_theirs(make(attention), config, ours)
    if attention == "eager":
        with pytest.raises(KeyError):
            logits(model)
    else:
        assert torch.equal(logits(model), logits(ours))
        want = save_theirs(model, tmp_path / "theirs")
        zeros = [want.pop(f"model.layers.0.self_attn.{x}_zero_point") for x in "qkv"]
        assert not any(zero.float().any() for zero in zeros)  # they are for asymmetric args only
        assert_same_tensors(state, want)
        section, their_section = read_section(tmp_path), read_section(tmp_path / "theirs")
        for x in (section, their_section):  # theirs numbers groups in the order of the model
            x["config_groups"] = sorted(x["config_groups"].values(), key=str)
        assert section == their_section
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
        assert torch.equal(logits(loaded), logits(ours))
    again, compressor = make(attention), ModelCompressor.from_pretrained(tmp_path)
    compressor.restore(again, tmp_path)
    assert torch.equal(logits(again), logits(ours))
    weights = compressor.decompress(tmp_path)
    assert weights.keys() == make().state_dict().keys()
    again.apply(disable_quantization)
    again.load_state_dict(weights)
    dense.apply(disable_quantization)
    assert torch.equal(logits(again), logits(dense))


def test_attention_with_weights_is_refused_and_its_inner_layers_are_not_meant():
    bad = QuantizationScheme(["LlamaAttention"], weights=QuantizationArgs())
    with pytest.raises(ConfigError, match="self_attn: a group of attention layers has only"):
        apply_quantization_config(make(), QuantizationConfig({"a": bad}))
    inner = QuantizationScheme.preset("FP8_DYNAMIC", ["re:.*self_attn.*"])
    report = apply_quantization_config(make(), QuantizationConfig({"a": inner}))
    names = [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"]
    assert report.groups == {"a": names}


def test_kv_cache_scheme_may_be_a_dict(tmp_path):
    config = config_of("FP8_DYNAMIC", kv_cache_scheme={**FP8, "strategy": "tensor"})
    assert config.kv_cache_scheme == QuantizationArgs(**FP8)
    ours = freeze(make(), config)
    model = apply_theirs(make(), config, ours)
    assert torch.equal(logits(ours), logits(model))
    want = save_theirs(model, tmp_path / "theirs")
    state = ModelCompressor(config).compress(ours)
    ours.save_pretrained(tmp_path, state_dict=dict(state))
    assert_same_tensors(state, want)
    assert read_section(tmp_path) == read_section(tmp_path / "theirs")


@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_asymmetric_floats_give_their_outputs_and_tensors(strategy, tmp_path):
    weights = QuantizationArgs(**FP8, symmetric=False, strategy=strategy)
    inputs = QuantizationArgs(**FP8, symmetric=False, strategy="token", dynamic=True)
    scheme = QuantizationScheme(["Linear"], weights=weights, input_activations=inputs)
    config = QuantizationConfig({"group_0": scheme}, ignore=["lm_head"])
    ours = freeze(make(), config)
    model = apply_theirs(make(), config, ours)
    assert torch.equal(logits(ours), logits(model))
    want = save_theirs(model, tmp_path / "theirs")
    state = ModelCompressor(config).compress(ours)
    assert state["model.layers.0.mlp.up_proj.weight_zero_point"].dtype is torch.float8_e4m3fn
    ours.save_pretrained(tmp_path, state_dict=dict(state))
    assert_same_tensors(state, want)
    again = make()
    ModelCompressor.from_pretrained(tmp_path).restore(again, tmp_path)
    assert torch.equal(logits(again), logits(ours))


@pytest.mark.parametrize(
    ("options", "format"),
    [
        ({**NVFP4, "group_size": 64}, "nvfp4-pack-quantized"),
        ({**NVFP4, "group_size": 32}, "nvfp4-pack-quantized"),
        ({"group_size": 64, "scale_dtype": "torch.uint8"}, "mxfp4-pack-quantized"),
        ({"group_size": 16, "scale_dtype": "torch.uint8"}, "mxfp4-pack-quantized"),
    ],
)
def test_groups_of_small_floats_may_have_any_size(options, format, tmp_path):
    args = QuantizationArgs(num_bits=4, type="float", **options)
    config = QuantizationConfig(
        {"group_0": QuantizationScheme(["Linear"], weights=args)}, ignore=["lm_head"]
    )
    ours = freeze(make(), config)
    if format.startswith("nvfp4"):
        assert torch.equal(logits(ours), logits(apply_theirs(make(), config)))
    state = ModelCompressor(config).compress(ours)
    ours.save_pretrained(tmp_path, state_dict=dict(state))
    assert read_section(tmp_path)["format"] == format
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert torch.equal(logits(loaded), logits(ours))


def test_small_floats_that_no_format_stores_are_refused_by_name():
    args = QuantizationArgs(num_bits=4, type="float", group_size=64)
    config = QuantizationConfig({"a": QuantizationScheme(["Linear"], weights=args)})
    with pytest.raises(ConfigError, match="no format stores floats of 4 bits"):
        apply_quantization_config(make(), config)


@pytest.mark.parametrize("preset", ["W4A16_ASYM", "NVFP4A16", "MXFP4A16", "MXFP6A16", "MXFP8A16"])
def test_decompressed_layers_have_their_scales_and_zero_points(preset):
    config = config_of(preset)
    ours = freeze(make(), config)
    model = apply_theirs(make(), config, ours)
    compressor = TheirCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    compressor.decompress_model(model)
    ours.apply(compress_quantized_weights)
    packed = dict(ours.state_dict())
    ours.apply(decompress_quantized_weights)
    name = "model.layers.0.mlp.down_proj"
    state, layer = ours.get_submodule(name).quantization, model.get_submodule(name)
    assert same_bits(ours.get_submodule(name).weight, layer.weight)
    for key in ("weight_scale", "weight_zero_point", "weight_global_scale"):
        assert hasattr(state, key) == hasattr(layer, key)
        assert not hasattr(layer, key) or same_bits(getattr(state, key), getattr(layer, key)), key
    ours.apply(compress_quantized_weights)
    assert_same_tensors(dict(ours.state_dict()), packed)


def test_layers_have_the_attributes_that_their_scripts_read():
    config = config_of("FP8_DYNAMIC")
    model = make()
    assert not is_model_quantized(model)
    apply_quantization_config(model, config)
    layer = model.model.layers[0].mlp.up_proj
    assert layer.quantization_scheme == config.config_groups["group_0"]
    assert is_module_quantized(layer)
    assert not is_module_quantized(model.lm_head)
    for status in ("initialized", "calibration", "frozen", "compressed"):
        apply_quantization_status(model, QuantizationStatus(status))
        assert layer.quantization_status == status
    assert layer.quantization_status >= QuantizationStatus.FROZEN
    twin = copy.deepcopy(model)
    twin.apply(decompress_quantized_weights)
    assert layer.quantization_status == "compressed"


@pytest.mark.parametrize("preset", ["W8A8", "FP8"])
def test_disabled_activations_are_not_quantized_until_enabled_again(preset):
    config = config_of(preset)
    weights_only = QuantizationScheme(["Linear"], weights=config.config_groups["group_0"].weights)
    dense_inputs = freeze(make(), QuantizationConfig({"group_0": weights_only}, ignore=["lm_head"]))
    ours = freeze(make(), config)
    want = logits(ours)
    ours.apply(disable_quantization)
    assert torch.equal(logits(ours), logits(dense_inputs))
    ours.apply(enable_quantization)
    assert torch.equal(logits(ours), want)


@pytest.mark.parametrize(("preset", "name"), [("FP8", "scale"), ("NVFP4", "global_scale")])
def test_a_frozen_config_with_static_activations_waits_for_their_scales(preset, name, tmp_path):
    config = config_of(preset)
    want = freeze(make(), config)
    want.save_pretrained(tmp_path, state_dict=ModelCompressor(config).compress(want))
    frozen = config_of(preset, quantization_status="frozen")
    model = make()
    report = apply_quantization_config(model, frozen)
    assert "static scales of activations are not set" in report.notes[-1]
    with pytest.raises(StatusError, match=f"q_proj: input_{name} is not set"):
        logits(model)
    load_pretrained_quantization_parameters(model, tmp_path)
    assert torch.equal(logits(model), logits(want))


EARLY = [
    (release, case)
    for release in ("0.4.0", "0.6.0")
    for case in json.loads((GOLDEN / release / "lifecycle.json").read_text())
]


@pytest.mark.parametrize(("release", "case"), EARLY)
def test_models_of_early_releases_give_their_outputs(release, case):
    """Among them: frozen ones, static scales per token, channels with a group size."""
    config = json.loads((GOLDEN / release / "lifecycle.json").read_text())[case]
    outputs = load_file(GOLDEN / release / "lifecycle-dense.safetensors")
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 10)).eval()
    compressor = ModelCompressor(QuantizationConfig.from_dict(config))
    compressor.restore(model, GOLDEN / release / f"lifecycle-{case}.safetensors")
    with torch.no_grad():
        assert same_results(model(outputs["input"]), outputs[case])


def test_weights_that_are_stored_dense_with_final_scales_load(tmp_path):
    """Older releases saved frozen models so: not rounded, symmetric ones with zero points too."""
    config = config_of("FP8", quantization_status="frozen", version=None)
    ours = freeze(make(), config_of("FP8"))
    model = apply_theirs(make(), config, ours)
    state = dict(model.state_dict())
    assert "model.layers.0.mlp.up_proj.input_zero_point" in state
    loaded = make()
    apply_quantization_config(loaded, config)
    loaded.load_state_dict(state)
    assert torch.equal(logits(loaded), logits(model))
    again = make()
    ModelCompressor(config).restore(again, state)
    assert torch.equal(logits(again), logits(model))
    stored = ModelCompressor(config).compress(again)
    assert not any(name.endswith("zero_point") for name in stored)


def test_scales_of_inputs_alone_are_loaded_with_the_state_dict():
    scheme = QuantizationScheme(["Linear"], input_activations=QuantizationArgs(**FP8))
    config = QuantizationConfig({"group_0": scheme}, ignore=["lm_head"])
    ours = freeze(make(), config)
    model = apply_theirs(make(), config, ours)
    config.quantization_status = "frozen"
    loaded = make()
    for x in loaded.parameters():
        x.data.zero_()
    apply_quantization_config(loaded, config)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(logits(loaded), logits(model))
    assert torch.equal(logits(loaded), logits(ours))


def test_scales_of_weights_are_loaded_before_freezing(tmp_path):
    config = config_of("W4A16_ASYM")
    want = freeze(make(), config)
    want.save_pretrained(tmp_path, state_dict=ModelCompressor(config).compress(want))
    model = make()
    apply_quantization_config(model, config_of("W4A16_ASYM"))
    load_pretrained_quantization_parameters(model, tmp_path, load_weight_qparams=True)
    layer = model.model.layers[0].mlp.up_proj
    expected = want.model.layers[0].mlp.up_proj.quantization.weight_zero_point
    assert same_bits(layer.quantization.params["weight"].zero_point, expected)
    model.apply(freeze_module_quantization)
    with pytest.raises(StatusError, match="before freezing"):
        load_pretrained_quantization_parameters(model, tmp_path, load_weight_qparams=True)


@pytest.mark.parametrize("config", [None, QuantizationConfig({}), config_of("UNQUANTIZED")])
def test_nothing_to_quantize_changes_nothing(config):
    model = make()
    want = logits(model)
    report = apply_quantization_config(model, config, show_progress=False)
    assert torch.equal(logits(model), want)
    assert not is_model_quantized(model)
    assert bool(report.notes) == (config is not None)


def test_configs_that_load_differently_elsewhere_are_refused():
    overlapping = QuantizationConfig({"W8A8": ["re:.*proj"], "W4A16": ["re:.*mlp.*"]})
    with pytest.raises(ConfigError, match="the groups W4A16 and W8A8 both match"):
        apply_quantization_config(make(), overlapping)
    unmatched = QuantizationConfig({"W8A8": ["re:.*convolution"]})
    with pytest.raises(ConfigError, match="no layer of the model matches"):
        apply_quantization_config(make(), unmatched)
    with pytest.raises(ConfigError, match="run_compressed"):
        apply_quantization_config(make(), config_of("W8A8"), run_compressed=True)
    model, config = make(), config_of("W8A8", quantization_status="calibration")
    apply_quantization_config(model, config)
    with pytest.raises(StatusError, match="already calibration"):
        apply_quantization_config(model, config)


def test_an_empty_group_keeps_its_layers_dense(tmp_path):
    groups = {"UNQUANTIZED": ["re:.*down_proj"], "W8A8": ["Linear"]}
    config = QuantizationConfig(groups, ignore=["lm_head"])
    ours = freeze(make(), config)
    model = apply_theirs(make(), config)
    assert torch.equal(logits(ours), logits(model))
    state = ModelCompressor(config).compress(ours)
    assert_same_tensors(state, save_theirs(model, tmp_path / "theirs"))
    ours.save_pretrained(tmp_path, state_dict=state)
    section, want = read_section(tmp_path), read_section(tmp_path / "theirs")
    assert list(section["config_groups"].values()) == list(want["config_groups"].values())
    assert set(section["ignore"]) == set(want["ignore"])


@pytest.mark.parametrize("preset", ["MXFP6A16", "MXFP6A8", "UNQUANTIZED"])
def test_folders_are_quantized_with_the_presets_of_0_20(preset, tmp_path):
    """In both dialects, with a group that keeps its layers dense."""
    dense, target = tmp_path / "dense", tmp_path / "target"
    make().save_pretrained(dense)
    groups = {preset: ["Linear"], "empty": {"targets": ["re:.*down_proj"]}}
    config = QuantizationConfig(groups, ignore=["lm_head"])
    if preset == "UNQUANTIZED":
        with pytest.raises(ConfigError, match="quantizes nothing"):
            quantize_folder(dense, target, config)
        return
    quantize_folder(dense, target, config)
    model = apply_theirs(make(), config)
    loaded = AutoModelForCausalLM.from_pretrained(target, dtype="auto")
    assert torch.equal(logits(loaded), logits(model))
    quantize_folder(dense, tmp_path / "slim", config, dialect="slim")
    weights = slimtensors.load(tmp_path / "slim")
    for name, x in loaded.state_dict().items():
        assert name not in weights or same_bits(weights[name], x), name


@pytest.mark.parametrize("preset", ["W8A8", "FP8"])
def test_the_config_of_a_model_is_found_again(preset, tmp_path):
    config = config_of(preset, kv_cache_scheme=QuantizationArgs(**FP8))
    ours = freeze(make(), QuantizationConfig({preset: ["Linear"]}, ignore=["lm_head"], kv_cache_scheme=config.kv_cache_scheme))  # noqa: E501  # fmt: skip
    found = QuantizationConfig.from_pretrained(ours)
    model = apply_theirs(make(), config, ours)
    want = theirs.QuantizationConfig.from_pretrained(model)
    assert found.quantization_status is QuantizationStatus.FROZEN
    found.quantization_status = QuantizationStatus(want.quantization_status.value)
    assert json.loads(found.model_dump_json()) == json.loads(want.model_dump_json())
    state = ModelCompressor(found).compress(ours)
    assert_same_tensors(state, save_theirs(model, tmp_path))
    assert QuantizationConfig.from_pretrained(make()) is None
