"""Stacked experts in quantized folders: divided where transformers loads linear layers."""

import json

import pytest
import torch
from quantized_models import make
from safetensors.torch import load_file
from strategies import same_bits
from transformers import AutoModelForCausalLM, Llama4TextConfig

import slimtensors
from slimtensors.cli import main
from slimtensors.quantization import QuantizationScheme
from slimtensors.quantization.affine import fake_quantize, find_params

IDS = torch.arange(48).view(2, 24) * 7 % 96
LAYERS = [f"model.layers.{i}.feed_forward.experts" for i in range(2)]


def run(*arguments):
    return main([str(argument) for argument in arguments])


def make_llama4(hidden=128, inner=128):
    torch.manual_seed(0)
    config = Llama4TextConfig(
        vocab_size=96,
        hidden_size=hidden,
        intermediate_size=inner,
        intermediate_size_mlp=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_local_experts=4,
        interleave_moe_layer_step=1,
        pad_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for x in model.parameters():
            if x.dim() == 3:
                x.normal_(std=0.05)  # transformers leaves stacks at zero
    return model


@pytest.fixture
def llama4(tmp_path):
    make_llama4().save_pretrained(tmp_path / "dense")
    return tmp_path / "dense"


@torch.no_grad()
def logits(folder, auto=AutoModelForCausalLM):
    return auto.from_pretrained(folder, dtype="auto").eval()(IDS).logits


def quantize_matrix(x, scheme):
    args = QuantizationScheme.preset(scheme).weights
    return fake_quantize(x, find_params(x, args), args)


def test_stock_transformers_loads_the_experts_of_llama4_quantized(llama4, tmp_path):
    out, back = tmp_path / "w4", tmp_path / "back"
    assert run("compress", llama4, "--quantize", "W4A16", "-o", out, "-q") == 0
    names = set(slimtensors.open(out))
    assert {f"{LAYERS[0]}.3.{x}_proj.weight_packed" for x in ("gate", "up", "down")} <= names
    assert not any(name.endswith("experts.gate_up_proj") for name in names)
    assert run("convert", out, "--to", "dense", "-o", back, "-q") == 0
    dense, source = load_file(back / "model.safetensors"), load_file(llama4 / "model.safetensors")
    assert dense.keys() == source.keys()
    for layer in LAYERS:
        for parameter in ("gate_up_proj", "down_proj"):
            stack = source[f"{layer}.{parameter}"]
            rounded = torch.stack([quantize_matrix(x.T.contiguous(), "W4A16").T for x in stack])
            assert same_bits(dense[f"{layer}.{parameter}"], rounded.contiguous())
    assert same_bits(logits(out), logits(back))


def test_our_loader_stacks_the_experts_again(llama4, tmp_path):
    from slimtensors.transformers import SparseAutoModelForCausalLM

    out, small, saved = (tmp_path / name for name in ("w4", "small", "saved"))
    assert run("compress", llama4, "--quantize", "W4A16", "-o", out, "-q") == 0
    assert run("compress", out, "-o", small, "-q") == 0
    expected = logits(out)
    assert same_bits(logits(out, SparseAutoModelForCausalLM), expected)
    model = AutoModelForCausalLM.from_pretrained(small, dtype="auto").eval()
    with torch.no_grad():
        assert same_bits(model(IDS).logits, expected)
    model.save_pretrained(saved, save_compressed=False)
    assert same_bits(logits(saved), expected)


def test_ignored_experts_are_divided_as_well(llama4, tmp_path):
    out = tmp_path / "w4"
    words = ["--ignore", "re:.*experts.*", "--ignore", "lm_head"]
    assert run("compress", llama4, "--quantize", "W4A16", *words, "-o", out, "-q") == 0
    report = json.loads((out / "quantization_report.json").read_text())
    dense = {x["name"] for x in report["dense_layers"] if x["reason"] == "ignored"}
    assert {f"{LAYERS[1]}.0.{x}_proj" for x in ("gate", "up", "down")} <= dense
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    source = load_file(llama4 / "model.safetensors")
    weight = model.get_submodule(f"{LAYERS[1]}.2.down_proj").weight
    assert same_bits(weight.detach(), source[f"{LAYERS[1]}.down_proj"][2].T.contiguous())


@pytest.mark.parametrize(("hidden", "inner"), [(128, 128), (128, 64), (64, 128)])
def test_square_matrices_do_not_hide_the_order_of_dimensions(tmp_path, hidden, inner):
    source, out, back = (tmp_path / name for name in ("dense", "w8", "back"))
    make_llama4(hidden, inner).save_pretrained(source)
    words = ["--quantize", "W8A16", "--group-size", "channel", "-q"]
    assert run("compress", source, *words, "-o", out) == 0
    scale = slimtensors.load(out)[f"{LAYERS[0]}.0.gate_proj.weight_scale"]
    assert scale.shape == (inner, 1)
    assert run("convert", out, "--to", "dense", "-o", back, "-q") == 0
    assert torch.allclose(logits(out), logits(back), atol=0.02)
    dense, given = (load_file(x / "model.safetensors") for x in (back, source))
    assert all(torch.allclose(dense[name], given[name], atol=0.005) for name in given)


def write_groups(path, **targets):
    bits = dict(zip(targets, (4, 8), strict=True))
    groups = {
        name: {"targets": [target], "weights": {"num_bits": bits[name], "group_size": 32}}
        for name, target in targets.items()
    }
    path.write_text(json.dumps({"config_groups": groups, "ignore": ["lm_head"]}))
    return path


def test_transformers_finds_the_group_of_the_experts(tmp_path):
    source, out, back = (tmp_path / name for name in ("dense", "mixed", "back"))
    make("mixtral").save_pretrained(source)
    config = write_groups(tmp_path / "a.json", a="re:.*self_attn.*", b="re:.*w[123]$")
    assert run("compress", source, "--quantize", config, "-o", out, "-q") == 0
    assert run("convert", out, "--to", "dense", "-o", back, "-q") == 0
    models = [AutoModelForCausalLM.from_pretrained(x, dtype="auto") for x in (out, back)]
    theirs, ours = (dict(model.named_parameters()) for model in models)
    experts = [name for name in ours if ".experts." in name]
    assert len(experts) == 4
    assert all(same_bits(theirs[name].detach(), ours[name].detach()) for name in experts)


def test_experts_in_several_groups_are_refused(tmp_path, capsys):
    make("mixtral").save_pretrained(tmp_path / "dense")
    config = write_groups(tmp_path / "a.json", a="re:.*w1$", b="re:.*w[23]$")
    words = ["--quantize", config, "-o", tmp_path / "out"]
    assert run("compress", tmp_path / "dense", *words) == 2
    assert "experts are in the groups a and b" in capsys.readouterr().err


def test_divided_experts_cannot_become_slim(llama4, tmp_path, capsys):
    out = tmp_path / "w4"
    assert run("compress", llama4, "--quantize", "W4A16", "-o", out, "-q") == 0
    assert run("convert", out, "--to", "slim", "-o", tmp_path / "slim") == 2
    assert "experts are stored one by one" in capsys.readouterr().err
    slim = tmp_path / "direct"
    words = ["--quantize", "W4A16", "--dialect", "slim", "-q"]
    assert run("compress", llama4, *words, "-o", slim) == 0
    assert f"{LAYERS[0]}.gate_up_proj" in slimtensors.open(slim)


def test_an_expert_that_is_missing_is_reported(llama4, tmp_path, capsys):
    out = tmp_path / "w4"
    assert run("compress", llama4, "--quantize", "W4A16", "-o", out, "-q") == 0
    file = out / "model.safetensors"
    lost = f"{LAYERS[0]}.1.up_proj"
    rest = {name: x for name, x in load_file(file).items() if not name.startswith(lost)}
    slimtensors.save(rest, file, preset="dense")
    assert run("convert", out, "--to", "dense", "-o", tmp_path / "back") == 3
    assert f"{out}: {lost}.weight not found among the experts" in capsys.readouterr().err
