"""Models that a recipe has changed, saved and loaded again, in architectures of every layout."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from architectures import catalogue
from safetensors.torch import save_file
from strategies import same_bits
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from slimtensors.errors import ConfigError
from slimtensors.quantization import QuantizationConfig, quantize_model
from slimtensors.recipe import GPTQ, Calibration, GradualMagnitudePruning, Quantize, SparseGPT
from slimtensors.transformers import enable, oneshot, train
from slimtensors.transformers.auto import load_pretrained
from slimtensors.transformers.calibrate import calibrate_folder

GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}
RECIPES = {
    "plain": [GPTQ(config_groups=GROUPS)],
    "2:4": [SparseGPT(mask_structure="2:4"), GPTQ(config_groups=GROUPS)],
}
TYPES = ("bert", "gpt2", "gpt_oss", "granitemoe", "llama4_text", "mixtral", "nomic_bert")
COMPARE = Path(__file__).parent / "programs" / "compare_with_stock.py"


def make(model_type):
    model = catalogue.find(model_type).build()
    return model, [catalogue.make_inputs(model)]


def check_same(model, folder):
    again, info = load_pretrained(type(model), folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    want, have = model.state_dict(), again.state_dict()
    assert want.keys() == have.keys()
    assert [name for name in want if not same_bits(want[name], have[name])] == []


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_result_of_a_recipe_loads_with_the_same_bits(tmp_path, model_type, recipe):
    model, batches = make(model_type)
    model, report = oneshot(model, RECIPES[recipe], batches, output_dir=tmp_path / "out")
    assert len(report.layers) >= 8
    check_same(model, tmp_path / "out")
    is_stock = recipe == "plain" and model_type in ("bert", "mixtral")
    assert report.format == ("pack-quantized" if is_stock else "slim")
    explained = any("stored in the dialect slim, which only" in note for note in report.notes)
    assert explained == (recipe == "plain" and not is_stock)


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore")  # of transformers, about missing kernels
def test_transformers_finds_the_group_of_experts_beside_shared_experts(tmp_path):
    model = catalogue.find("nemotron_h").build()
    model, _ = oneshot(model, [Quantize("W4A16")], output_dir=tmp_path / "out")
    section = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert len(section["config_groups"]) == 2
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    want, have = model.state_dict(), loaded.state_dict()
    experts = [name for name in want if ".experts." in name]
    assert experts
    assert [name for name in experts if not same_bits(want[name], have[name])] == []


def test_stacks_beside_quantized_layers_are_stored_where_they_load(tmp_path):
    model, batches = make("llama4_text")
    recipe = [GPTQ(config_groups=GROUPS, ignore=["lm_head", "re:.*experts.*"])]
    model, report = oneshot(model, recipe, batches, output_dir=tmp_path / "out")
    assert report.format == "slim"
    assert any("loads experts one by one" in note for note in report.notes)
    check_same(model, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.interop
@pytest.mark.parametrize(
    "model_type", ["mixtral", *(pytest.param(x, marks=pytest.mark.long) for x in ("bert", "llava"))]
)
def test_stock_transformers_loads_the_same_weights(tmp_path, model_type):
    model, batches = make(model_type)
    model, _ = oneshot(model, RECIPES["plain"], batches, output_dir=tmp_path / "out")
    tied = model.all_tied_weights_keys
    weights = {n: x.contiguous() for n, x in model.state_dict().items() if n not in tied}
    save_file(weights, tmp_path / "weights.safetensors")
    command = [sys.executable, COMPARE, type(model).__name__, tmp_path / "out"]
    command.append(tmp_path / "weights.safetensors")
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert {*result.stdout.splitlines()} == {f"same {name}" for name in weights}


@pytest.mark.parametrize(
    "model_type", ["falcon", pytest.param("bailing_hybrid", marks=pytest.mark.long)]
)
def test_a_model_that_transformers_cannot_load_quantized_gets_a_note(tmp_path, model_type):
    model, _ = make(model_type)
    recipe = [Quantize(config_groups=GROUPS)]
    model, report = oneshot(model, recipe, output_dir=tmp_path / "out")
    assert f"transformers cannot load {type(model).__name__} with this" in report.notes[-1]
    check_same(model, tmp_path / "out")


def test_a_config_that_cannot_be_saved_is_refused_before_any_work(tmp_path):
    model, batches = make("llama")
    model.config.layer_types = ["full_attention"]  # of two layers
    with pytest.raises(ConfigError, match="config of the model cannot be saved"):
        oneshot(model, RECIPES["plain"], batches, output_dir=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_model_that_transformers_does_not_load_back_is_refused_before_any_work(tmp_path):
    model, batches = make("shieldgemma2")
    with pytest.raises(ConfigError, match="does not load a Gemma3ForConditionalGeneration that"):
        oneshot(model, RECIPES["plain"], batches, output_dir=tmp_path / "out")


def test_conv1d_is_pruned_along_its_inputs():
    model, batches = make("gpt2")
    model, report = oneshot(model, [SparseGPT(mask_structure="2:4")], batches)
    assert len(report.layers) == 8
    for layer in report.layers:
        weight = model.get_submodule(layer.name).weight  # [inputs, outputs]
        assert weight.T.reshape(-1, 4).ne(0).sum(1).max() == 2
    (head,) = report.unchanged
    assert (head.name, head.reason) == (
        "lm_head",
        "output layer, tied to transformer.wte.weight",
    )


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss"])
def test_activations_that_cannot_be_stored_are_refused_before_any_work(tmp_path, model_type):
    model, batches = make(model_type)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    calls = []
    model.register_forward_pre_hook(lambda *args: calls.append(args))
    recipe = [Quantize("W8A8")]
    with pytest.raises(ConfigError, match=r"compressed-tensors cannot store .* and the dialect"):
        oneshot(model, recipe, batches, output_dir=tmp_path / "out")
    training = [GradualMagnitudePruning(0.5), *recipe]
    with pytest.raises(ConfigError, match=r"compressed-tensors cannot store .* and the dialect"):
        train(model, training, batches, output_dir=tmp_path / "trained")
    assert not calls
    assert all(same_bits(x, before[name]) for name, x in model.state_dict().items())
    assert not (tmp_path / "out").exists()
    oneshot(model, recipe, batches)  # in memory


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_oss", "mixtral", "nomic_bert"])
def test_a_quantized_model_saves_itself_in_a_layout_that_loads(tmp_path, caplog, model_type):
    model, batches = make(model_type)
    config = QuantizationConfig.from_dict(
        {"config_groups": GROUPS, "ignore": ["lm_head", "cls.predictions.decoder"]}
    )
    quantize_model(model, config, calibration=batches)
    enable(model).save_pretrained(tmp_path / "out", save_compressed=True)
    check_same(model, tmp_path / "out")
    assert ("compressed-tensors cannot store" in caplog.text) == (model_type != "mixtral")
    assert not hasattr(model.config, "quantization_config")


@pytest.mark.parametrize("model_type", ["gpt2", "mixtral"])
def test_calibrated_folders_load_with_rounded_weights(tmp_path, model_type):
    model = catalogue.find(model_type).build(torch.bfloat16)
    model.save_pretrained(tmp_path / "dense")
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
    words.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "dense")
    config = QuantizationConfig.from_dict({"config_groups": GROUPS, "ignore": ["lm_head"]})
    options = {
        "calibration": Calibration(samples=4, length=8, batch_size=2),
        "dtype": torch.float32,
    }
    text = [" ".join(f"w{i * i % 64}" for i in range(64))]
    folders = [tmp_path / dialect for dialect in ("slim", "compressed-tensors")]
    for folder in folders[: 1 if model_type == "gpt2" else 2]:
        calibrate_folder(tmp_path / "dense", folder, config, text, dialect=folder.name, **options)
    again, info = load_pretrained(type(model), folders[0], output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert again.dtype is torch.bfloat16
    if model_type == "mixtral":
        check_same(again, folders[1])
        return
    weight = again.transformer.h[0].mlp.c_fc.weight  # [inputs, outputs]
    groups = weight.T.float().reshape(-1, 16)
    assert max(len(group.unique()) for group in groups) <= 16 < len(weight.unique())
    with pytest.raises(ConfigError, match=r"cannot store .*\(Conv1D, .* use the dialect slim"):
        calibrate_folder(tmp_path / "dense", folders[1], config, text, **options)


def test_all_layers_that_do_not_fit_are_listed_at_once():
    model, batches = make("deepseek_v3")
    wide = {"g": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}
    recipe = [SparseGPT(mask_structure="3:6"), GPTQ(config_groups=wide)]
    with pytest.raises(ConfigError) as caught:
        oneshot(model, recipe, batches)
    message = str(caught.value)
    assert "layers.0.self_attn.kv_b_proj, model.layers.1.self_attn.kv_b_proj: 16 col" in message
    assert "SparseGPT: " in message
    assert "more: 64 columns are not divisible into groups of 6" in message


@pytest.mark.parametrize(
    ("model_type", "head", "tied"),
    [
        ("bert", "cls.predictions.decoder", "bert.embeddings.word_embeddings.weight"),
        ("roberta", "lm_head.decoder", "roberta.embeddings.word_embeddings.weight"),
        ("gpt_neox_japanese", "embed_out", "gpt_neox_japanese.embed_in.weight"),
    ],
)
def test_output_layers_of_any_name_are_left_alone_by_default(model_type, head, tied):
    model, batches = make(model_type)
    before = model.get_submodule(head).weight.clone()
    model, report = oneshot(model, RECIPES["2:4"], batches)
    assert torch.equal(model.get_submodule(head).weight, before)
    reasons = {layer.name: layer.reason for layer in report.unchanged}
    assert reasons == {head: f"output layer, tied to {tied}"}
    assert f"{head} (output layer, tied to {tied})" in str(report)
    assert report.to_json()["unchanged"][0]["name"] == head


def test_tied_layers_are_refused_if_nothing_is_ignored():
    model, batches = make("bert")
    with pytest.raises(ConfigError, match=r"cls\.predictions\.decoder: tied weights cannot be"):
        oneshot(model, [SparseGPT(ignore=[])], batches)


def test_every_unchanged_linear_layer_has_a_reason():
    model, batches = make("llama")
    recipe = [GPTQ(config_groups={"g": {**GROUPS["group_0"], "targets": ["re:.*mlp.*"]}},
                   ignore=["lm_head", "re:.*down_proj"])]  # fmt: skip
    _, report = oneshot(model, recipe, batches)
    reasons = {layer.name.rpartition(".")[2]: layer.reason for layer in report.unchanged}
    expected = dict.fromkeys(["q_proj", "k_proj", "v_proj", "o_proj"], "not targeted")
    assert reasons == {**expected, "down_proj": "ignored", "lm_head": "output layer"}
