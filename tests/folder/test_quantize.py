"""transformers and compressed-tensors load quantized folders with the weights that we stored."""

import json
import logging
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from architectures import catalogue
from architectures.stock import StockProcess
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from strategies import same_bits
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import slimtensors
from slimtensors.errors import ConfigError
from slimtensors.folder.architecture import Architecture
from slimtensors.folder.convert import convert_folder
from slimtensors.folder.quantize import quantize_folder
from slimtensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from slimtensors.quantization.affine import fake_quantize, find_params

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore"),  # of models, while they are built
]

ARGS = {
    "int8": QuantizationArgs(num_bits=8, strategy="channel"),
    "int4": QuantizationArgs(num_bits=4, strategy="group", group_size=32),
}

SMALL = {"vocab_size": 96, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64}

GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 64, "n_layer": 1, "n_head": 4}


def make_config(name, ignore=("lm_head",)):
    format = "int-quantized" if name == "int8" else None
    scheme = QuantizationScheme(["Linear"], weights=ARGS[name], format=format)
    return QuantizationConfig({"group_0": scheme}, ignore=list(ignore))


def quantize(model, folder, name="int8", ignore=("lm_head",), **options):
    model.save_pretrained(folder / "dense")
    quantize_folder(folder / "dense", folder / "out", make_config(name, ignore), **options)
    return folder / "out"


def load_stock(model, folder, args):
    """Load a folder with compressed-tensors; return the layers that are quantized.

    Raise if any weight is neither the dense one nor, in these layers, the rounded one.
    """
    dense = type(model).from_pretrained(folder.parent / "dense").state_dict()
    loaded, info = type(model).from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    quantized = {n for n, m in loaded.named_modules() if hasattr(m, "quantization_scheme")}
    loaded.hf_quantizer.compressor.decompress_model(loaded)
    state = loaded.state_dict()
    for name, x in dense.items():
        if name.removesuffix(".weight") in quantized and name.endswith(".weight"):
            x = fake_quantize(x, find_params(x, args), args)
        assert same_bits(state[name], x), name
    return quantized


def make_tiny(model_type):
    return catalogue.find(model_type).build(torch.bfloat16)


def make_encoder_decoder():
    gpt2 = GPT2Config(**GPT2, add_cross_attention=True)
    bert = BertConfig(**SMALL | {"num_hidden_layers": 1}, num_attention_heads=4)
    return EncoderDecoderModel(encoder=BertModel(bert), decoder=GPT2LMHeadModel(gpt2))


def make_mixtral():
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 2}
    return MixtralForCausalLM(MixtralConfig(**SMALL, **heads)).to(torch.bfloat16)


@pytest.mark.parametrize("name", ARGS)
@pytest.mark.parametrize("model_type", ["llava", "ctrl", "nomic_bert"])
def test_all_linear_layers_except_the_head_load_as_they_were_rounded(tmp_path, model_type, name):
    model = make_tiny(model_type)
    folder = quantize(model, tmp_path, name)
    quantized = load_stock(model, folder, ARGS[name])
    head = model.get_output_embeddings()
    assert quantized == {
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head
    }


def test_a_layer_that_does_not_get_smaller_is_ignored(tmp_path):
    model = make_tiny("swinv2")
    folder = quantize(model, tmp_path)
    quantized = load_stock(model, folder, ARGS["int8"])
    dense = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)} - quantized
    assert dense
    assert all(n.endswith("continuous_position_bias_mlp.0") for n in dense)
    assert dense <= set(read_section(folder)["ignore"])
    _, info = type(model.base_model).from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"]


def read_section(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


def stored_names(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return set(file.keys())


def test_transposed_layers_of_an_inner_model_stay_dense(tmp_path):
    model = make_encoder_decoder().to(torch.bfloat16)
    folder = quantize(model, tmp_path)
    quantized = load_stock(model, folder, ARGS["int8"])
    assert quantized
    assert all(name.startswith("encoder.") for name in quantized)


def test_a_folder_of_transposed_layers_is_refused(tmp_path):
    model = GPT2LMHeadModel(GPT2Config(**GPT2))
    with pytest.raises(ConfigError, match="transposed linear layer"):
        quantize(model, tmp_path)


def test_routers_stay_dense_and_are_ignored(tmp_path):
    folder = quantize(make_mixtral(), tmp_path, "int4")
    gate = "block_sparse_moe.gate"
    assert f"model.layers.0.{gate}.weight" in stored_names(folder)
    assert f"model.layers.0.{gate}" in read_section(folder)["ignore"]


@pytest.mark.parametrize(
    ("name", "ignore", "reason"),
    [
        ("int4", ["lm_head"], None),
        ("int8", ["lm_head"], "fails for the format int-quantized"),
        ("int4", ["lm_head", "re:.*experts.*"], "fails for dense weights in a quantized folder"),
    ],
)
def test_experts_that_transformers_cannot_load_are_logged(tmp_path, caplog, name, ignore, reason):
    model = make_mixtral()
    folder = quantize(model, tmp_path, name, ignore)
    warnings = [x.getMessage() for x in caplog.records if "cannot load" in x.getMessage()]
    if reason is None:
        assert not warnings
        type(model).from_pretrained(folder)
    else:
        assert reason in warnings[0]
        with pytest.raises(RuntimeError):
            type(model).from_pretrained(folder)


@pytest.mark.parametrize(("name", "ignore"), [("int8", "lm_head"), ("int4", "re:.*experts.*")])
def test_experts_that_transformers_would_load_as_random_weights_are_refused(tmp_path, name, ignore):
    model = make_tiny("nemotron_h")
    with pytest.raises(ConfigError, match=r"random weights for .*experts.* FP8_DYNAMIC, or"):
        quantize(model, tmp_path, name, [ignore])
    quantize(model, tmp_path / "slim", name, [ignore], dialect="slim")
    folder = quantize(model, tmp_path / "int4", "int4")
    assert not any(type(model).from_pretrained(folder, output_loading_info=True)[1].values())


def test_experts_load_by_their_group_if_shared_experts_are_in_another(tmp_path):
    model = make_tiny("nemotron_h")
    model.save_pretrained(tmp_path / "dense")
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    quantize_folder(tmp_path / "dense", tmp_path / "out", config)
    assert len(read_section(tmp_path / "out")["config_groups"]) > 1
    convert_folder(tmp_path / "out", tmp_path / "rounded", to="dense")
    rounded = type(model).from_pretrained(tmp_path / "rounded").state_dict()
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    experts = [name for name in rounded if ".experts." in name]
    assert experts
    assert all(same_bits(loaded.state_dict()[name], rounded[name]) for name in experts)


def test_packed_zero_points_that_transformers_cannot_load_are_logged(tmp_path, caplog):
    args = replace(ARGS["int4"], symmetric=False)
    config = QuantizationConfig(
        {"group_0": QuantizationScheme(["Linear"], weights=args)}, ignore=["lm_head"]
    )
    model = make_llama()
    model.save_pretrained(tmp_path / "dense")
    quantize_folder(tmp_path / "dense", tmp_path / "out", config)
    assert "cannot load LlamaForCausalLM with this quantization" in caplog.text
    assert "zero points of asymmetric weights are packed" in caplog.text
    with pytest.raises(RuntimeError, match="mismatched"):
        type(model).from_pretrained(tmp_path / "out")


def test_codes_of_the_slim_dialect_load_elsewhere_once_converted(tmp_path):
    model = make_tiny("llava")
    slim = quantize(model, tmp_path, "int4", dialect="slim")
    convert_folder(slim, tmp_path / "converted", to="compressed-tensors")
    assert len(load_stock(model, tmp_path / "converted", ARGS["int4"])) > 20


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("nomic_bert", r"Wqkv.weight.* \(not a layer of the model, or split on load\)"),
        ("llama4_text", "loads experts one by one"),
    ],
)
def test_codes_that_others_would_not_load_are_not_converted(tmp_path, model_type, reason):
    slim = quantize(make_tiny(model_type), tmp_path, "int4", dialect="slim")
    with pytest.raises(ConfigError, match=reason):
        convert_folder(slim, tmp_path / "converted", to="compressed-tensors")
    assert not (tmp_path / "converted").exists()


def make_t5():
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 64, "num_layers": 1, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=96, **sizes)).to(torch.bfloat16)


def test_an_architecture_that_transformers_cannot_load_quantized_is_logged(tmp_path, caplog):
    model = make_t5()
    folder = quantize(model, tmp_path, "int4")
    assert "transformers cannot load T5ForConditionalGeneration" in caplog.text
    with pytest.raises(AttributeError, match="no attribute 'weight'"):
        type(model).from_pretrained(folder)
    caplog.clear()
    load_stock(model, quantize(model, tmp_path / "int8"), ARGS["int8"])
    assert "cannot load" not in caplog.text


def test_a_split_that_transformers_cannot_do_is_logged_even_if_it_is_not_needed(tmp_path, caplog):
    model = make_tiny("dinov2")
    folder = quantize(model, tmp_path, "int8")
    assert "mlp.gate_proj.weight: is split on load" in caplog.text
    with pytest.raises(ValueError, match="one to many"):
        type(model).from_pretrained(folder)


def test_only_layers_that_transformers_cannot_load_quantized_stay_dense(tmp_path):
    model = make_tiny("wav2vec2")
    folder = quantize(model, tmp_path, "int4")
    quantized = load_stock(model, folder, ARGS["int4"])
    assert "wav2vec2.feature_projection.projection" not in quantized
    assert "wav2vec2.encoder.layers.0.attention.q_proj" in quantized


def test_weights_that_are_split_on_load_are_stored_split(tmp_path):
    model = make_tiny("nomic_bert")
    folder = quantize(model, tmp_path, "int4")
    assert any("Wqkv" in name for name in stored_names(tmp_path / "dense"))
    assert not any("Wqkv.weight" in name for name in stored_names(folder))
    assert any("q_proj.weight_packed" in name for name in stored_names(folder))


def make_llama():
    return LlamaForCausalLM(LlamaConfig(**SMALL, num_attention_heads=4, num_key_value_heads=2))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "no_such_model"}, "no model type 'no_such_model'"),
        ({"model_type": ["llama"]}, "no model type ['llama']"),
        ({"architectures": ["NoSuchModel"]}, "no model class 'NoSuchModel'"),
        ({"architectures": ["AutoConfig"]}, "not a model class"),
        ({"architectures": ["BertModel"]}, "not a model of type llama"),
        ({"hidden_size": "wide"}, "rejects the config of llama"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; at most 10000"),
        ({"model_type": "dinat", "architectures": ["DinatModel"]}, "requires the natten library"),
        ({"hidden_act": "no_such_function"}, "LlamaForCausalLM cannot be built"),
        ({"hidden_size": 128, "vocab_size": 4}, "most tensors do not belong to LlamaForCausalLM"),
    ],
)
def test_layers_are_recognized_by_names_if_the_model_cannot_be_built(
    tmp_path, caplog, change, reason
):
    make_llama().save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    quantize_folder(tmp_path / "dense", tmp_path / "out", make_config("int8"))
    (message,) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert "recognized by the names of tensors" in message
    assert reason in message
    names = stored_names(tmp_path / "out")
    assert sum(name.endswith("weight_scale") for name in names) == 14
    assert "lm_head.weight_scale" not in names


def test_the_first_class_that_transformers_has_is_built():
    config = LlamaConfig(**SMALL).to_dict() | {"architectures": ["OwnLlama", "LlamaForCausalLM"]}
    assert isinstance(Architecture.build(config).model, LlamaForCausalLM)


@pytest.mark.parametrize("architectures", [None, ["LlamaModel"]])
def test_names_with_the_prefix_of_the_base_model_are_quantized(tmp_path, architectures):
    make_llama().to(torch.bfloat16).save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": architectures}))
    quantize_folder(tmp_path / "dense", tmp_path / "out", make_config("int4"))
    assert len(load_stock(make_llama(), tmp_path / "out", ARGS["int4"])) == 14


def test_names_without_the_prefix_of_the_base_model_are_quantized(tmp_path):
    model = make_tiny("bloom")
    model.save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): x for name, x in load_file(path).items()}
    save_file(tensors, path, {"format": "pt"})
    quantize_folder(tmp_path / "dense", tmp_path / "out", make_config("int4"))
    assert len(load_stock(model, tmp_path / "out", ARGS["int4"])) == 8


def test_the_tied_output_layer_is_ignored_if_the_config_names_no_architecture(tmp_path):
    model = make_tiny("bloom")
    model.save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": None}))
    config = make_config("int4", ignore=["re:.*dense_h_to_4h"])
    quantize_folder(tmp_path / "dense", tmp_path / "out", config)
    assert len(load_stock(model, tmp_path / "out", ARGS["int4"])) == 6


def test_stacks_of_experts_that_are_missing_are_ignored(tmp_path):
    make_tiny("llama4_text").save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "model.safetensors"
    experts = "model.layers.1.feed_forward.experts."
    tensors = {name: x for name, x in load_file(path).items() if not name.startswith(experts)}
    save_file(tensors, path, {"format": "pt"})
    quantize_folder(tmp_path / "dense", tmp_path / "out", make_config("int4"))
    assert f"{experts}0.up_proj" in read_section(tmp_path / "out")["ignore"]


def test_remote_code_is_not_run(tmp_path, caplog):
    make_llama().save_pretrained(tmp_path / "dense")
    path = tmp_path / "dense" / "config.json"
    changed = {
        "auto_map": {"AutoModelForCausalLM": "evil.Model"},
        "model_type": "evil",
        "architectures": ["Model"],
    }
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    (tmp_path / "dense" / "evil.py").write_text("raise SystemExit('remote code')")
    quantize_folder(tmp_path / "dense", tmp_path / "out", make_config("int8"))
    assert "recognized by the names of tensors" in caplog.text


def test_the_slim_dialect_quantizes_the_same_layers(tmp_path):
    model = make_tiny("ctrl")
    quantize(model, tmp_path, dialect="slim")
    loaded = slimtensors.load(tmp_path / "out")
    dense = model.state_dict()
    changed = {name for name, x in loaded.items() if not same_bits(x, dense[name])}
    linear = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    assert changed == linear - {"lm_head.weight"}


def test_threads_leave_the_functions_of_transformers_alone(tmp_path):
    make_llama().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    before = PreTrainedModel.tie_weights, torch.linspace, list(warnings.filters)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(Architecture.build, [config] * 12))
    assert before == (PreTrainedModel.tie_weights, torch.linspace, list(warnings.filters))


def write_narrow(folder):
    """Write a Llama with 192 and 256 columns."""
    torch.manual_seed(0)
    sizes = SMALL | {"hidden_size": 192, "intermediate_size": 256}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder / "dense")
    return model


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "LlamaModel"])
def test_group_sizes_of_a_preset_fit_and_load_elsewhere(tmp_path, name):
    model = write_narrow(tmp_path)
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    summary = quantize_folder(tmp_path / "dense", tmp_path / "out", config)
    smaller = {x.name: x.group_size for x in summary.quantization.group_sizes}
    assert set(smaller.values()) == {64}
    assert len(smaller) == 12
    assert "group size 64 instead of 128: 12 layers with 192 columns" in str(summary.quantization)
    stored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    groups = stored["config_groups"]
    assert [*groups] == sorted(groups)
    assert {x: group["weights"]["group_size"] for x, group in groups.items()} == {
        "group_0": 128,
        "group_1": 64,
    }
    with StockProcess() as stock:
        answer = stock.load(tmp_path / "out", name, tmp_path / "loaded.safetensors")
    assert "error" not in answer, answer
    assert len(answer["quantized"]) == 14
    state = load_file(tmp_path / "loaded.safetensors")
    prefix = "" if name == "LlamaForCausalLM" else "model."
    for key, x in model.state_dict().items():
        layer = key.removesuffix(".weight")
        if layer.removeprefix(prefix) in answer["quantized"]:
            args = QuantizationArgs(num_bits=4, group_size=smaller.get(layer, 128))
            x = fake_quantize(x, find_params(x, args), args)
        if key.startswith(prefix):
            assert same_bits(state[key.removeprefix(prefix)], x), key


def test_a_chosen_group_size_that_fits_no_layer_names_all_of_them(tmp_path):
    write_narrow(tmp_path)
    config = QuantizationConfig.preset("W4A16", ignore=["lm_head"], group_size=128)
    with pytest.raises(ConfigError) as error:
        quantize_folder(tmp_path / "dense", tmp_path / "out", config)
    message = str(error.value)
    assert "12 layers cannot be quantized" in message
    assert "model.layers.*.self_attn.q_proj (2)" in message
    assert "group sizes that fit: 96, 64, 48, 32, 24, 16, channel" in message


def test_a_group_size_that_makes_a_layer_no_smaller_is_not_used(tmp_path):
    model = write_narrow(tmp_path)
    config = json.loads((tmp_path / "dense" / "config.json").read_text())
    model.score = nn.Linear(17, 2, bias=False)
    state = {**load_file(tmp_path / "dense" / "model.safetensors")}
    state["score.weight"] = torch.randn(2, 6).bfloat16()
    save_file(state, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "dense" / "config.json").write_text(json.dumps(config | {"model_type": "own"}))
    chosen = QuantizationConfig.preset("W4A16", ignore=["lm_head"])
    summary = quantize_folder(tmp_path / "dense", tmp_path / "out", chosen)
    dense = {layer.name: layer.reason for layer in summary.quantization.dense_layers}
    assert dense["score"] == "would not get smaller"
    assert "score" not in {layer.name for layer in summary.quantization.group_sizes}
