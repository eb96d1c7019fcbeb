"""`ModelCompressor` of compressed-tensors 0.4 to 0.14: sparse weights, alone and quantized."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from strategies import same_bits
from tiny_models import TOKENS, llama, mixtral, same_weights
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import slimtensors
from slimtensors import BitmaskConfig, ModelCompressor, Sparse24BitmaskConfig, compat
from slimtensors.errors import ConfigError, MismatchError
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from slimtensors.quantization.state import get_quantization
from slimtensors.transformers import SparseAutoModelForCausalLM

GOLDEN = Path(__file__).parents[1] / "golden" / "compressed_tensors" / "0.14.0.1"
QUANTIZED = [
    f"sparse-{kind}8-{form}" for kind in ("int", "float") for form in ("bitmask", "24-bitmask")
]


def copy_golden(name, folder):
    folder.mkdir()
    shutil.copy(GOLDEN / f"{name}.safetensors", folder / "model.safetensors")
    shutil.copy(GOLDEN / f"{name}-config.json", folder / "config.json")
    return folder


def make_layers(device="cpu"):
    """The model of the golden files, with other weights."""
    model = nn.Module()
    for name, columns, rows in (("gate_proj", 24, 12), ("up_proj", 40, 9), ("lm_head", 24, 5)):
        layer = nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16, device=device)
        model.add_module(name, layer)
    return model


def make_24(model):
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.view(-1, 4)[:, 1:3] = 0
    return model


def quantize(model, kind="int", form=None):
    """Attach and freeze 8-bit codes; return the config."""
    args = QuantizationArgs(num_bits=8, strategy="channel", type=kind)
    groups = {"group_0": QuantizationScheme(["Linear"], weights=args)}
    config = QuantizationConfig(groups, ignore=["lm_head"], format=form or f"{kind}-quantized")
    config.quantization_status = QuantizationStatus.FROZEN
    apply_quantization_config(model, config)
    return config


@pytest.mark.parametrize("name", QUANTIZED)
def test_sparse_codes_of_0_14_are_decompressed(tmp_path, name):
    folder = copy_golden(name, tmp_path / "model")
    compressor = ModelCompressor.from_pretrained(folder)
    assert compressor.sparsity_config.format == f"sparse-{name.split('-', 2)[2]}"
    assert compressor.sparsity_config.targets == ["Linear"]
    assert compressor.quantization_config.ignore == ["lm_head"]
    want = load_file(GOLDEN / f"{name}-dense.safetensors")
    have = compressor.decompress(folder)
    assert have.keys() == want.keys()
    assert all(same_bits(have[key], x) for key, x in want.items())


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_are_loaded_into_the_model_on_any_device(tmp_path, name, device):
    folder = copy_golden(name, tmp_path / "model")
    compressor = ModelCompressor.from_pretrained(folder)
    model = make_layers(device)
    compressor.decompress(model_path=folder, model=model)
    want = load_file(GOLDEN / f"{name}-dense.safetensors")
    assert all(same_bits(x.data, want[key]) for key, x in model.named_parameters() if key in want)
    assert not any(x.is_meta for x in model.state_dict().values())
    assert get_quantization(model.up_proj).status is QuantizationStatus.FROZEN
    assert get_quantization(model.lm_head) is None
    assert model.sparsity_config is compressor.sparsity_config
    assert model.quantization_config is compressor.quantization_config
    state = compressor.compress(model)
    stored = load_file(folder / "model.safetensors")
    assert state.keys() == stored.keys()
    assert all(same_bits(state[key], x) for key, x in stored.items()), "compressed again, equal"


@pytest.mark.parametrize("kind", ["int", "float"])
@pytest.mark.parametrize("sparsity", [BitmaskConfig, Sparse24BitmaskConfig])
def test_a_model_is_quantized_and_stored_sparse(tmp_path, kind, sparsity):
    model = make_24(llama(dtype=torch.bfloat16))
    config = quantize(model, kind)
    compressor = ModelCompressor(
        sparsity_config=sparsity(targets=["Linear"], ignore=["lm_head"]), quantization_config=config
    )
    state = compressor.compress(model)
    up = "model.layers.0.mlp.up_proj"
    assert state[f"{up}.compressed"].element_size() == 1
    if kind == "int":
        assert (state[f"{up}.compressed"] == -128).any(), "a code that 0.14 drops from 2:4 weights"
    assert {f"{up}.bitmask", f"{up}.shape", f"{up}.weight_scale"} <= state.keys()
    assert f"{up}.weight" not in state
    dense = compressor.decompress(state)
    model.save_pretrained(tmp_path / "small", state_dict=state)
    compressor.update_config(tmp_path / "small")
    section = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert section["sparsity_config"]["format"] == compressor.sparsity_config.format
    assert section["sparsity_config"]["targets"] == ["Linear"]
    assert section["quantization_status"] == "compressed"
    loaded, info = SparseAutoModelForCausalLM.from_pretrained(
        tmp_path / "small", output_loading_info=True
    )
    assert not any(info.values())
    assert all(same_bits(dense[name], x.data) for name, x in loaded.named_parameters())
    weights = dict(model.named_parameters())
    assert all(same_bits(x.data, weights[name].data) for name, x in loaded.named_parameters())
    loaded.save_pretrained(tmp_path / "again")
    files = [tmp_path / folder / "model.safetensors" for folder in ("small", "again")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_targets_select_the_layers_that_are_stored_sparse(tmp_path):
    model = make_24(llama())
    config = BitmaskConfig(targets=["re:.*q_proj", "re:.*k_proj"], ignore=["re:.*k_proj"])
    state = ModelCompressor(sparsity_config=config).compress(model)
    names = {name.removesuffix(".bitmask") for name in state if name.endswith(".bitmask")}
    assert names == {f"model.layers.{i}.self_attn.q_proj" for i in range(2)}
    slimtensors.transformers.enable(model).save_pretrained(tmp_path, sparsity_config=config)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name.removesuffix(".weight.bitmask") for name in stored if ".bitmask" in name} == names


def test_the_whole_cycle_of_0_14(tmp_path):
    model = make_24(llama(tied=True))
    compressor = ModelCompressor.from_pretrained_model(model, "sparse-24-bitmask")
    assert isinstance(compressor.sparsity_config, compat.Sparse24BitMaskConfig)
    assert isinstance(compressor.sparsity_config, compat.SparsityCompressionConfig)
    state = compressor.compress(model, model.state_dict(), show_progress=False)
    type(model).save_pretrained(model, tmp_path / "small", state_dict=state)
    compressor.update_config(str(tmp_path / "small"))
    again = ModelCompressor.from_pretrained(str(tmp_path / "small"))
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(model.config)
    again.decompress(model_path=str(tmp_path / "small"), model=target)
    assert same_weights(target, model)
    assert target.lm_head.weight is target.model.embed_tokens.weight


def test_folders_that_are_not_compressed_have_no_compressor(tmp_path):
    llama().save_pretrained(tmp_path / "dense")
    assert ModelCompressor.from_pretrained(tmp_path / "dense") is None
    assert ModelCompressor.from_compression_config(None) is None
    assert ModelCompressor.from_compression_config({"quant_method": "compressed-tensors"}) is None
    assert ModelCompressor.from_pretrained_model(llama()) is None
    with pytest.raises(ConfigError, match=r"config\.json not found"):
        ModelCompressor.from_pretrained(tmp_path)


@pytest.mark.parametrize("method", ["compressed-tensors", "compressed_tensors", "sparseml"])
def test_sections_are_split(method):
    section = json.loads((GOLDEN / "sparse-int8-24-bitmask-config.json").read_text())
    section = section["quantization_config"] | {"quant_method": method}
    sparsity = ModelCompressor.parse_sparsity_config(section)
    assert sparsity == section["sparsity_config"]
    quantization = ModelCompressor.parse_quantization_config(section)
    dropped = {"sparsity_config", "transform_config", "version"}
    assert quantization == {key: x for key, x in section.items() if key not in dropped}
    compressor = ModelCompressor.from_compression_config(section)
    assert isinstance(compressor.sparsity_config, Sparse24BitmaskConfig)
    assert compressor.quantization_config.config_groups["group_0"].weights.num_bits == 8
    only = {"quant_method": method, "sparsity_config": sparsity, "version": "0.14.0.1"}
    assert ModelCompressor.parse_quantization_config(only) is None
    assert ModelCompressor.from_compression_config(only).quantization_config is None
    assert ModelCompressor.parse_sparsity_config(quantization) is None


def test_the_section_as_an_object_of_transformers_is_read(tmp_path):
    pytest.importorskip("compressed_tensors")
    from transformers.utils.quantization_config import CompressedTensorsConfig

    folder = copy_golden("sparse-int8-24-bitmask", tmp_path / "model")
    section = json.loads((folder / "config.json").read_text())["quantization_config"]
    compressor = ModelCompressor.from_compression_config(CompressedTensorsConfig(**section))
    assert compressor.quantization_config.config_groups.keys() == {"group_0"}


def test_update_config_keeps_the_rest_of_the_file(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "quantization_config": {}}')
    compressor = ModelCompressor(BitmaskConfig(global_sparsity=0.5, targets=["Linear"]))
    compressor.update_config(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "llama",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "version": "0.20.0",
            "sparsity_config": {
                "format": "sparse-bitmask",
                "global_sparsity": 0.5,
                "ignore": [],
                "registry_requires_subclass": False,
                "sparsity_structure": "unstructured",
                "targets": ["Linear"],
            },
        },
    }
    (tmp_path / "new").mkdir()
    compressor.update_config(tmp_path / "new")
    assert ModelCompressor.from_pretrained(tmp_path / "new").sparsity_config.targets == ["Linear"]


def test_the_config_of_a_quantized_model_is_found(tmp_path):
    model = llama()
    config = quantize(model)
    compressor = ModelCompressor.from_pretrained_model(model)
    found = compressor.quantization_config
    assert found.config_groups.keys() == {"group_0"}
    assert found.config_groups["group_0"].weights == config.config_groups["group_0"].weights
    state = compressor.compress(model)
    want = ModelCompressor(quantization_config=config).compress(model)
    assert state.keys() == want.keys()
    assert all(same_bits(x, want[name]) for name, x in state.items())
    with pytest.raises(ConfigError, match=r"quantization_format.*int-quantized"):
        ModelCompressor.from_pretrained_model(model, quantization_format="pack-quantized")


@pytest.mark.parametrize("form", ["int-quantized", "pack-quantized"])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_compressed_and_decompressed_in_place(device, form):
    model = llama()
    config = quantize(model, form=form)
    want = {name: x.clone() for name, x in model.state_dict().items()}
    logits = model(TOKENS).logits
    compressor = ModelCompressor(quantization_config=config)
    compressor.compress_model(model)
    assert "model.layers.0.mlp.up_proj.weight_scale" in model.state_dict()
    model.to(device)
    compressor.decompress_model(model)
    have = model.state_dict()
    assert have.keys() == want.keys()
    assert all(
        (x.shape, x.dtype) == (want[name].shape, want[name].dtype) for name, x in have.items()
    )
    if device == "cpu":
        assert all(same_bits(x, want[name]) for name, x in have.items())
        assert torch.equal(model(TOKENS).logits, logits)
    else:
        assert all(x.is_meta for x in have.values())


def test_what_is_not_supported_is_named():
    model = llama()
    sparse = ModelCompressor(BitmaskConfig())
    with pytest.raises(ConfigError, match="compress_model requires a quantization_config"):
        sparse.compress_model(model)
    with pytest.raises(ConfigError, match="unknown compression format 'marlin-24'"):
        ModelCompressor.from_pretrained_model(model, "marlin-24")
    quantized = ModelCompressor(quantize(model))
    with pytest.raises(ConfigError, match="state_dict is not supported"):
        quantized.compress(model, model.state_dict())
    with pytest.raises(TypeError, match="transform_config"):
        ModelCompressor(BitmaskConfig(), transform_config={})


def test_weights_that_do_not_fit_are_named(tmp_path):
    model = mixtral()
    slimtensors.transformers.enable(model).save_pretrained(
        tmp_path, sparsity_config=BitmaskConfig()
    )
    target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(MismatchError, match=r"missing .*unexpected .*SparseAutoModel"):
        ModelCompressor.from_pretrained(tmp_path).decompress(tmp_path, target)


def test_negative_zeros_are_kept():
    model = nn.Sequential(nn.Linear(64, 8, bias=False))
    with torch.no_grad():
        model[0].weight.zero_()[0, :3] = torch.tensor([-0.0, 1.0, -0.0])
    for config in (BitmaskConfig(), Sparse24BitmaskConfig()):
        compressor = ModelCompressor(config)
        back = compressor.decompress(compressor.compress(model))
        assert same_bits(back["0.weight"], model[0].weight.data)


def test_only_allowed_modules_are_quantized():
    model = llama()
    mlp = model.model.layers[0].mlp
    args = QuantizationArgs(num_bits=8, strategy="channel")
    config = QuantizationConfig({"group_0": QuantizationScheme(["Linear"], weights=args)})
    config.quantization_status = QuantizationStatus.FROZEN
    apply_quantization_config(model, config, allowed_modules=[mlp, mlp.up_proj, mlp.gate_proj])
    quantized = {x for x in model.modules() if get_quantization(x) is not None}
    assert quantized == {mlp.up_proj, mlp.gate_proj}
    state = ModelCompressor(quantization_config=config).compress(model)
    scales = {name for name in state if name.endswith("weight_scale")}
    assert scales == {f"model.layers.0.mlp.{name}_proj.weight_scale" for name in ("up", "gate")}
