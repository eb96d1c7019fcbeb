"""Quantize whole models layer by layer: grids, zeros, smoothing, resuming, reports."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from strategies import same_results
from torch import nn
from transformers import (
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

from slimtensors import ModelCompressor
from slimtensors.errors import ConfigError, CorruptFileError, MismatchError
from slimtensors.layerwise.gptq import rtn
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.layerwise.inputs import Layer, collect_layers
from slimtensors.layerwise.quantize import GPTQ, RTN, quantize_layer
from slimtensors.layerwise.resume import INDEX_FILE
from slimtensors.layerwise.smoothing import AWQ, SmoothQuant
from slimtensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    compress_quantized_weights,
    quantize_model,
)
from slimtensors.quantization.affine import fake_quantize, find_params
from slimtensors.quantization.layers import Weight

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def llama(**more):
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 50, "num_key_value_heads": 2, **more}
    model = LlamaForCausalLM(LlamaConfig(**sizes))
    randomize_norms(model)
    return model


def randomize_norms(model):
    """Set the weights of norms to values of different magnitudes, like those of a trained model."""
    for name, p in model.named_parameters():
        if "norm" in name.lower() and name.endswith("weight"):
            p.data.copy_(torch.randn_like(p).mul(0.7).exp())


def tokens(count=3, vocabulary=50):
    random = torch.Generator().manual_seed(3)
    batches = [torch.randint(0, vocabulary, (2, 20), generator=random) for _ in range(count)]
    return [{"input_ids": x} for x in batches]


def config(*, targets=("Linear",), ignore=("lm_head",), inputs=None, **args):
    weights = QuantizationArgs(**{"num_bits": 4, "group_size": 16, **args})
    scheme = QuantizationScheme(targets, weights=weights, input_activations=inputs)
    return QuantizationConfig({"group_0": scheme}, ignore=list(ignore))


def outputs(model, data):
    with torch.no_grad():
        results = [model(**batch) for batch in data]
    return torch.cat([r.logits if hasattr(r, "logits") else r.last_hidden_state for r in results])


def loss(model, dense, data):
    return float((outputs(model, data) - outputs(dense, data)).square().mean())


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Use one thread: small matrices gain nothing from more, and lose on busy cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def dense():
    return llama()


def quantize(dense, cfg, **options):
    model = copy.deepcopy(dense)
    return model, quantize_model(model, cfg, calibration=tokens(), **options)


def test_only_targets_change_and_are_on_their_grid(dense):
    cfg = config()
    model, report = quantize(dense, cfg)
    before, after = dense.state_dict(), model.state_dict()
    assert before.keys() == after.keys()
    for name, (weight, params) in report.results.items():
        assert torch.equal(weight, after[f"{name}.weight"])
        args = cfg.config_groups["group_0"].weights
        assert torch.equal(fake_quantize(weight, params, args), weight)
    names = {name.removesuffix(".weight") for name in before}
    changed = {n for n in names if not torch.equal(before[f"{n}.weight"], after[f"{n}.weight"])}
    assert changed == set(report.results)
    assert len(changed) == 2 * 7


def test_gptq_changes_outputs_less_than_rounding_to_nearest(dense):
    data = tokens()
    losses = {m: loss(quantize(dense, config(), method=m)[0], dense, data) for m in ("gptq", "rtn")}
    assert losses["gptq"] < 0.8 * losses["rtn"]


def test_progress_and_report_list_every_layer(dense):
    seen = []
    _, report = quantize(dense, config(), progress=lambda *what: seen.append(what))
    assert [(one, total) for _, one, total in seen] == [(i, 14) for i in range(1, 15)]
    assert [layer for layer, _, _ in seen] == list(report.layers)
    for layer in report.layers:
        assert layer.method == "gptq"
        assert layer.tokens == 3 * 2 * 20
        assert 0 < layer.error < layer.nearest_error
        assert not layer.notes
    assert json.loads(json.dumps(report.to_json()))["layers"][0]["name"].endswith("q_proj")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("smoothing", [None, SmoothQuant(), AWQ(steps=4)])
def test_zeros_are_preserved(dense, method, smoothing):
    pruned = copy.deepcopy(dense)
    for name, p in pruned.named_parameters():
        if "proj" in name:
            least = p.data.view(-1, 4).abs().topk(2, largest=False).indices
            p.data.copy_(p.data.view(-1, 4).scatter(1, least, 0).view_as(p))
    zeros = {name: p == 0 for name, p in pruned.named_parameters() if "proj" in name}
    model, _ = quantize(pruned, config(), method=method, smoothing=smoothing)
    for name, mask in zeros.items():
        assert not model.get_parameter(name)[mask].any()


@pytest.mark.parametrize("order", ["weight", "group"])
def test_actorder_is_applied(dense, order):
    _, report = quantize(dense, config(actorder=order))
    ordered = [params.g_idx is not None for _, params in report.results.values()]
    assert all(ordered) if order == "group" else not any(ordered)


def test_options_of_a_method_are_its_fields(dense):
    heavy, _ = quantize(dense, config(), method=GPTQ(damping=1e6))
    nearest, _ = quantize(dense, config(), method=RTN())
    for name, x in heavy.state_dict().items():
        same = (x == nearest.state_dict()[name]).float().mean()
        assert same > 0.99, "with this damping only rounding remains, except for ties"
    with pytest.raises(ConfigError, match="did you mean 'gptq'"):
        quantize(dense, config(), method="gtpq")


@pytest.mark.parametrize("smoothing", [SmoothQuant(), SmoothQuant(0.8), AWQ(steps=4)])
def test_smoothing_preserves_outputs(dense, smoothing):
    fine = config(num_bits=8)
    model, report = quantize(dense, fine, method="rtn", smoothing=smoothing)
    assert not report.notes
    norms = [name for name, _ in dense.named_parameters() if "layernorm" in name]
    left = [torch.equal(model.get_parameter(name), dense.get_parameter(name)) for name in norms]
    assert not any(left) or isinstance(smoothing, AWQ), "AWQ may choose not to scale"
    torch.testing.assert_close(
        outputs(model, tokens()), outputs(dense, tokens()), rtol=0, atol=2e-2
    )


def test_smoothing_reduces_the_error_of_quantized_inputs(dense):
    spiky = copy.deepcopy(dense)
    for name, p in spiky.named_parameters():
        if "layernorm" in name:
            p.data[:2] *= 50
    token = QuantizationArgs(num_bits=4, strategy="token", dynamic=True)
    cfg = config(num_bits=8, group_size=-1, inputs=token)
    plain, _ = quantize(spiky, cfg, method="rtn")
    smooth, _ = quantize(spiky, cfg, method="rtn", smoothing=SmoothQuant())
    assert loss(smooth, spiky, tokens()) < 0.8 * loss(plain, spiky, tokens())


def test_awq_gives_large_inputs_a_larger_scale():
    torch.manual_seed(0)
    inputs = Hessian(32)
    inputs.add(torch.randn(200, 32) * torch.tensor([30.0] * 2 + [1.0] * 30))
    args = QuantizationArgs(num_bits=3, group_size=16)
    layer = Layer("one", nn.Linear(32, 48), Weight("weight"), args)
    scale = AWQ().scale(inputs, [layer])
    assert scale[:2].min() > scale[2:].max()
    weight, hessian = layer.matrix, inputs.mean()
    smooth = output_error(rtn(weight * scale, args).weight / scale - weight, hessian)
    assert smooth < output_error(rtn(weight, args).weight - weight, hessian)


def test_a_norm_with_other_readers_is_not_smoothed_and_noted():
    torch.manual_seed(0)
    bert = BertModel(BertConfig(vocab_size=50, **SMALL)).eval()
    randomize_norms(bert)
    model = copy.deepcopy(bert)
    report = quantize_model(model, config(ignore=()), calibration=tokens(), smoothing=SmoothQuant())
    assert len(report.notes) == 2
    assert all("not smoothed" in note for note in report.notes)
    for name, p in bert.named_parameters():
        if "LayerNorm" in name:
            assert torch.equal(p, model.get_parameter(name))


def test_a_norm_that_adds_one_to_its_weight_is_smoothed():
    from transformers import GemmaConfig, GemmaForCausalLM

    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 50, "num_key_value_heads": 2, "head_dim": 8}
    gemma = GemmaForCausalLM(GemmaConfig(**sizes)).eval()
    model = copy.deepcopy(gemma)
    fine = config(num_bits=8, group_size=1)
    report = quantize_model(
        model, fine, calibration=tokens(), method="rtn", smoothing=SmoothQuant()
    )
    assert not report.notes
    torch.testing.assert_close(
        outputs(model, tokens()), outputs(gemma, tokens()), rtol=0, atol=2e-2
    )


def test_transposed_layers_of_gpt2_are_quantized():
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 2, "vocab_size": 50, "n_positions": 32}
    gpt2 = GPT2LMHeadModel(GPT2Config(**sizes)).eval()
    models = {}
    for method in ("gptq", "rtn"):
        models[method] = copy.deepcopy(gpt2)
        cfg = config(targets=("Conv1D",))
        report = quantize_model(models[method], cfg, calibration=tokens(), method=method)
        assert len(report.layers) == 2 * 4
        assert all(layer.method == method for layer in report.layers)
        for name, (weight, _) in report.results.items():
            assert torch.equal(weight.T, models[method].get_submodule(name).weight)
    losses = {method: loss(model, gpt2, tokens()) for method, model in models.items()}
    assert losses["gptq"] < 0.8 * losses["rtn"]


def test_an_expert_without_tokens_is_rounded_to_nearest_and_noted():
    torch.manual_seed(0)
    sizes = {**SMALL, "vocab_size": 50, "num_key_value_heads": 2, "num_local_experts": 4}
    mixtral = MixtralForCausalLM(MixtralConfig(**sizes, num_experts_per_tok=1)).eval()
    for name, p in mixtral.named_parameters():
        if name.endswith("gate.weight"):
            p.data[3] = p.data[2]  # the router prefers the first of two equal experts
    model = copy.deepcopy(mixtral)
    implementation = model.config._experts_implementation
    cfg = config(ignore=("lm_head", "re:.*gate$"))
    report = quantize_model(model, cfg, calibration=tokens())
    assert model.config._experts_implementation == implementation
    stacks = {layer.name: layer for layer in report.layers if "experts" in layer.name}
    assert len(stacks) == 2 * 2
    for layer in stacks.values():
        assert layer.method == "gptq"
        assert layer.error < layer.nearest_error
        assert any("of 4: no nonzero inputs" in note for note in layer.notes)
    nearest = copy.deepcopy(mixtral)
    quantize_model(nearest, cfg, method="rtn")
    quantized, rounded, name = (
        model.state_dict(),
        nearest.state_dict(),
        "model.layers.0.mlp.experts",
    )
    unseen = int(stacks[f"{name}.gate_up_proj"].notes[0].split()[1].strip(","))
    for part in ("gate_up_proj", "down_proj"):
        pairs = zip(quantized[f"{name}.{part}"], rounded[f"{name}.{part}"], strict=True)
        same = [torch.equal(a, b) for a, b in pairs]
        assert same[unseen]
        assert not all(same)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("kind", ["tensor", "channel", "group", "tensor_group"])
def test_experts_are_rounded_individually(kind, symmetric):
    args = QuantizationArgs(
        num_bits=4,
        type="float" if kind == "tensor_group" else "int",
        strategy=kind,
        group_size=16 if "group" in kind else None,
        symmetric=symmetric or kind == "tensor_group",
    )
    experts = nn.Module()
    experts.down = nn.Parameter(torch.randn(3, 8, 32, generator=torch.Generator().manual_seed(0)))
    layer = Layer("experts.down", experts, Weight("down", stacked=True), args)
    result, _ = quantize_layer(layer, RTN(), {})
    expected = find_params(experts.down.data, args)
    assert torch.equal(result.params.scale, expected.scale)
    assert torch.equal(result.weight, fake_quantize(experts.down.data, expected, args))


@pytest.mark.parametrize("order", [None, "weight", "group"])
def test_a_stored_model_has_the_same_weights(dense, order, tmp_path):
    cfg = config(actorder=order)
    model, report = quantize(dense, cfg)
    before = outputs(model, tokens())
    model.apply(compress_quantized_weights)
    assert same_results(outputs(model, tokens()), before)
    compressor = ModelCompressor(quantization_config=cfg)
    model.save_pretrained(tmp_path, state_dict=compressor.compress(model))
    back = ModelCompressor.from_pretrained(tmp_path).decompress(tmp_path)
    for name, (weight, _) in report.results.items():
        assert torch.equal(back[f"{name}.weight"], weight)


def test_layers_outside_of_the_blocks_are_calibrated_too(dense):
    _, report = quantize(dense, config(ignore=()))
    assert report.layers[-1].name == "lm_head"
    assert report.layers[-1].method == "gptq"
    assert report.layers[-1].error < report.layers[-1].nearest_error
    assert not report.notes


def test_static_activations_are_calibrated_on_the_quantized_model(dense):
    static = QuantizationArgs(num_bits=8, strategy="tensor")
    model, _ = quantize(dense, config(inputs=static))
    state = model.model.layers[0].mlp.down_proj.quantization
    assert state.status == "frozen"
    assert float(state.input_scale) > 0


def test_training_mode_is_restored():
    model = llama(attention_dropout=0.5).train()
    model.lm_head.eval()
    quantize_model(model, config(), calibration=tokens())
    assert model.training
    assert not model.lm_head.training


SMOOTHINGS = {"plain": None, "smooth": SmoothQuant()}
LAST = 10  # in the middle of the second block


def quantize_until_killed(folder, smoothing):
    """Quantize, and kill the process after some layers."""

    def progress(layer, finished, total):
        if finished == LAST:
            os.kill(os.getpid(), signal.SIGKILL)

    options = {"calibration": tokens(), "smoothing": smoothing, "folder": folder}
    quantize_model(llama(), config(), **options, progress=progress)


def test_a_killed_run_resumes_with_the_same_result(tmp_path, dense):
    script = Path(__file__).with_name("kill_quantization.py")
    env = {**os.environ, "PYTHONPATH": str(script.parent.parent)}
    command = [sys.executable, str(script), str(tmp_path)]
    process = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [str(-signal.SIGKILL)] * 2, process.stderr
    for name, smoothing in SMOOTHINGS.items():
        folder = tmp_path / name
        finished = json.loads((folder / INDEX_FILE).read_text())["finished"]
        assert len([layer for layer in finished if layer.endswith("proj")]) == LAST
        times = {p: p.stat().st_mtime_ns for p in folder.iterdir() if p.name != INDEX_FILE}
        whole, report = quantize(dense, config(), smoothing=smoothing)
        again, resumed = quantize(dense, config(), smoothing=smoothing, folder=folder)
        assert resumed.layers == report.layers
        for key, x in whole.state_dict().items():
            assert torch.equal(x, again.state_dict()[key]), key
        assert all(path.stat().st_mtime_ns == time for path, time in times.items()), (
            "a finished layer was computed again"
        )


def test_a_work_folder_of_another_run_raises(tmp_path, dense):
    def start(**changes):
        usual = {"model": dense, "config": config(), "calibration": tokens()}
        options = {**usual, "folder": tmp_path / "work", **changes}
        return quantize_model(**options | {"model": copy.deepcopy(options["model"])})

    first = start()
    assert start().layers == first.layers
    other = copy.deepcopy(dense)
    other.lm_head.weight.data[0, 0] += 1
    for what, options in {
        "model": {"model": other},
        "config": {"config": config(num_bits=3)},
        "config ": {"method": GPTQ(damping=0.02)},
        "calibration": {"calibration": tokens(2)},
    }.items():
        with pytest.raises(MismatchError, match=f"started with a different {what.strip()};"):
            start(**options)
    file = tmp_path / "work" / "00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CorruptFileError, match="checksum"):
        start()
    (tmp_path / "work" / INDEX_FILE).write_text("{}")
    with pytest.raises(CorruptFileError, match="malformed work folder index"):
        start()


def test_invalid_input_raises(dense):
    with pytest.raises(ConfigError, match="calibration data is required"):
        quantize_model(copy.deepcopy(dense), config())
    with pytest.raises(ConfigError, match="its weight is tied"):
        quantize(llama(tie_word_embeddings=True), config(ignore=()))
    broken = copy.deepcopy(dense)
    broken.model.layers[1].mlp.up_proj.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.(up|down)_proj.*NaN"):
        quantize(broken, config())


def test_a_singular_hessian_falls_back_to_rounding():
    model = llama()
    apply_quantization_config(model, config())
    layer = next(each for each in collect_layers(model).values() if each.args)
    columns = layer.matrix.shape[1]
    bad = Hessian(columns)
    bad.add(torch.randn(4, columns))
    bad._sum = 2 * torch.eye(columns) - torch.ones(columns, columns)
    result, report = quantize_layer(layer, GPTQ(), {(layer.name, 0): bad})
    assert report.method == "rtn"
    assert "not positive definite, even with damping 1.28: rounded to nearest" in report.notes[-1]
    assert torch.equal(result.weight, rtn(layer.matrix, layer.args).weight)
