"""Pruning: exact shares and structures, small output errors, targets and allocation."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from slimtensors.errors import ConfigError, MismatchError, StatusError
from slimtensors.layerwise.allocation import by_outliers, find_layers, per_block, per_target
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.layerwise.inputs import collect_layers
from slimtensors.layerwise.prune import (
    Magnitude,
    PruningTarget,
    SparseGPT,
    Wanda,
    prune_layer,
    prune_model,
)
from slimtensors.layerwise.sparsegpt import sparsegpt
from slimtensors.layerwise.structure import Blocks, Groups, Rows, Unstructured, parse_structure
from slimtensors.quantization import QuantizationConfig, apply_quantization_config, quantize_model

METHODS = [Magnitude(), Wanda(), SparseGPT(block_size=16)]
STRUCTURES = ["unstructured", "1:4", "2:4", "4:8", "8:16", "rows", "4x4", "8x1"]
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_hessian(columns, seed=1):
    inputs = random(256, columns, seed=seed)
    inputs = inputs + inputs[:, :8] @ random(8, columns, seed=seed + 1)
    hessian = Hessian(columns)
    hessian.add(inputs * random(columns, seed=seed + 2).exp())
    return hessian


def prune(method, weight, hessian, share, structure="unstructured", **more):
    structure = parse_structure(structure)
    target = PruningTarget(share if structure.share is None else structure.share, structure, **more)
    return method.prune(weight, hessian, target, tell=lambda text: None)


def llama():
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def batches(count=3):
    return [{"input_ids": torch.randint(64, (2, 10))} for _ in range(count)]


def sparsity(layer):
    return float((layer.matrix == 0).float().mean())


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.name)
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_zeros_have_the_requested_share_and_structure(method, structure, dtype):
    weight = random(32, 64).to(dtype)
    pruned = prune(method, weight, make_hessian(64).mean(), 0.75, structure)
    assert pruned.dtype == dtype
    expected = parse_structure(structure)
    share = 0.75 if expected.share is None else expected.share
    assert int((pruned == 0).sum()) == round(share * weight.numel())
    if isinstance(expected, Groups):
        assert ((pruned.view(-1, expected.size) != 0).sum(1) == expected.kept).all()
    if isinstance(expected, Rows):
        assert int(pruned.any(1).sum()) == 8
    if isinstance(expected, Blocks):
        blocks = (pruned != 0).view(
            32 // expected.height, expected.height, 64 // expected.width, expected.width
        )
        assert (blocks.sum((1, 3)) % (expected.height * expected.width) == 0).all()


@given(share=st.floats(0, 0.99), rows=st.integers(1, 9), columns=st.integers(1, 40))
def test_unstructured_zeros_have_the_exact_share(share, rows, columns):
    weight = random(rows, columns)
    zeros = Unstructured().zeros(weight.abs(), share)
    assert int(zeros.sum()) == round(share * rows * columns)
    if zeros.any() and not zeros.all():
        assert weight.abs()[zeros].max() <= weight.abs()[~zeros].min()
    by_row = Unstructured().zeros(weight.abs(), share, per_row=True)
    assert by_row.sum(1).eq(round(share * columns)).all()


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scores_may_be_parameters_of_any_dtype(structure, dtype):
    scores = torch.randint(0, 64, (32, 64), generator=torch.Generator().manual_seed(3)) / 8
    expected = parse_structure(structure).zeros(scores, 0.5)
    found = parse_structure(structure).zeros(nn.Parameter(scores.to(dtype)), 0.5)
    assert found.any()
    assert found.sum() == expected.sum()
    if structure in (
        "unstructured",
        "1:4",
        "2:4",
        "4:8",
        "8:16",
    ):  # others sum scores, which rounds
        assert torch.equal(found, expected)


def test_ties_do_not_exceed_the_share():
    assert int(Unstructured().zeros(torch.ones(4, 10), 0.35).sum()) == 14
    assert Unstructured().zeros(torch.ones(4, 10), 0.3, per_row=True).sum(1).tolist() == [3] * 4


@pytest.mark.parametrize("structure", ["unstructured", "2:4", "8:16", "4x4"])
def test_methods_that_use_inputs_have_smaller_errors(structure):
    weight, hessian = random(48, 64), make_hessian(64).mean()
    errors = [
        output_error(weight - prune(method, weight, hessian, 0.5, structure), hessian)
        for method in METHODS
    ]
    assert errors[2] < 0.7 * errors[1] < 0.5 * errors[0]


def test_sparsegpt_matches_the_published_algorithm():
    """Compare with zeros and updates by the inverse Hessian, column by column."""
    weight, hessian = random(8, 24), make_hessian(24).mean()
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(24)
    inverse = torch.linalg.cholesky(torch.linalg.inv(damped.double()), upper=True)
    slow = weight.double()
    for begin in range(0, 24, 8):
        scores = slow[:, begin : begin + 8] ** 2 / inverse.diagonal()[begin : begin + 8] ** 2
        limit = scores.flatten().kthvalue(32).values
        for j in range(begin, begin + 8):
            error = torch.where(scores[:, j - begin] <= limit, slow[:, j], 0) / inverse[j, j]
            slow[:, j:] -= error[:, None] * inverse[j, j:]
            slow[scores[:, j - begin] <= limit, j] = 0
    fast = sparsegpt(weight, hessian, 0.5, block_size=8)
    assert torch.equal(fast == 0, slow == 0)
    torch.testing.assert_close(fast, slow.float(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.name)
def test_existing_zeros_are_preserved(method):
    weight = random(16, 32)
    held = random(16, 32, seed=5) > 0.3
    pruned = prune(method, weight.masked_fill(held, 0), make_hessian(32).mean(), 0.5, held=held)
    assert not pruned[held].any()
    pruned = prune(
        method, weight.masked_fill(held, 0), make_hessian(32).mean(), 0.5, "2:4", held=held
    )
    assert not pruned[held].any()
    assert ((pruned.view(-1, 4) != 0).sum(1) <= 2).all()


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.name)
def test_a_model_is_pruned_in_place_with_reports(method):
    model = llama()
    dense = copy.deepcopy(model)
    layers = find_layers(model, ["Linear"], ["lm_head"])
    calls = []
    reports = prune_model(
        model,
        dict.fromkeys(layers, 0.5),
        method=method,
        calibration=batches(),
        progress=lambda *each: calls.append(each[1:]),
    )
    assert [each.name for each in reports] == list(layers)
    assert calls == [(i, 21) for i in range(1, 22)]
    assert all(sparsity(layer) == 0.5 for layer in layers.values())
    assert torch.equal(model.lm_head.weight, dense.lm_head.weight)
    if method.needs_inputs:
        assert all(each.method == method.name and 0 < each.cosine < 1 for each in reports)
        assert all(each.tokens == 60 and each.mse > 0 for each in reports)
    if isinstance(method, SparseGPT):
        assert all(each.error < each.nearest_error for each in reports)


def test_experts_are_pruned_individually():
    torch.manual_seed(0)
    model = MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=2)).eval()
    layers = find_layers(model, ["re:.*experts"], [])
    reports = prune_model(
        model, dict.fromkeys(layers, 0.5), method=SparseGPT(), calibration=batches()
    )
    assert len(reports) == 6
    assert all(x.eq(0).float().mean() == 0.5 for layer in layers.values() for x in layer.matrices)


@pytest.mark.parametrize("method", METHODS, ids=lambda x: x.name)
@pytest.mark.parametrize("scheme", ["W4A16_ASYM", "W8A8", "MXFP4A16"])
def test_a_quantized_model_stays_on_its_grid(method, scheme):
    model = llama()
    config = QuantizationConfig.preset(scheme, ignore=["lm_head"])
    scheme = config.config_groups["group_0"]
    if scheme.weights.group_size == 128:
        scheme = scheme.to_dict()
        scheme["weights"]["group_size"] = 16
        config = QuantizationConfig({"group_0": scheme}, ignore=["lm_head"])
    quantize_model(model, config, calibration=batches())
    layers = find_layers(model, ["Linear"], ["lm_head"])
    before = {
        name: copy.copy(layer.module.quantization.tensors()) for name, layer in layers.items()
    }
    prune_model(model, dict.fromkeys(layers, 0.5), method=method, calibration=batches())
    for name, layer in layers.items():
        state = layer.module.quantization
        assert sparsity(layer) >= 0.5
        assert torch.equal(state.dense_weight(layer.weight), layer.parameter), (
            "codes are not updated"
        )
        assert torch.equal(state.tensors()["weight_scale"], before[name]["weight_scale"])


def test_a_model_quantized_by_an_earlier_run_raises():
    model = llama()
    config = QuantizationConfig.preset("W8A8", ignore=["lm_head"])
    config.quantization_status = "frozen"
    apply_quantization_config(model, config)
    with pytest.raises(StatusError, match="quantized by an earlier run"):
        prune_model(model, {"model.layers.0.mlp.up_proj": 0.5}, method=Magnitude())


def test_an_interrupted_run_resumes_after_the_last_finished_layer(tmp_path):
    data, dense = batches(), llama()
    shares = dict.fromkeys(find_layers(dense, ["Linear"], ["lm_head"]), 0.6)
    options = {"method": SparseGPT(), "calibration": data}
    whole = copy.deepcopy(dense)
    expected = prune_model(whole, shares, **options)

    class KilledError(Exception):
        pass

    def kill(report, finished, of):
        if finished == 9:
            raise KilledError

    with pytest.raises(KilledError):
        prune_model(copy.deepcopy(dense), shares, folder=tmp_path, progress=kill, **options)
    for _ in range(2):  # resume once from the middle, once from the end
        again = copy.deepcopy(dense)
        assert prune_model(again, shares, folder=tmp_path, **options) == expected
        assert all(
            torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True)
        )
    with pytest.raises(MismatchError, match="started with a different config"):
        prune_model(dense, shares, folder=tmp_path, method=Wanda(), calibration=data)


def test_a_singular_hessian_falls_back_to_wanda():
    model = llama()
    name = "model.layers.0.mlp.up_proj"
    layer = collect_layers(model)[name]
    bad = Hessian(32)
    bad.add(random(4, 32))
    bad._sum = 2 * torch.eye(32) - torch.ones(32, 32)
    _, report = prune_layer(layer, SparseGPT(), {(name, 0): bad}, 0.5, Unstructured())
    assert report.method == "wanda"
    assert "pruned by wanda" in report.notes[-1]
    weight, report = prune_layer(layer, SparseGPT(), {}, 0.5, Unstructured())
    assert report.method == "magnitude"
    assert "by magnitude" in report.notes[0]
    assert torch.equal(weight == 0, Unstructured().zeros(layer.matrix.abs(), 0.5))


def test_layers_outside_of_the_blocks_use_their_inputs():
    model = llama()
    (report,) = prune_model(model, {"lm_head": 0.5}, method=Wanda(), calibration=batches())
    assert report.method == "wanda"
    assert not report.notes


def test_targets_are_layers_modules_classes_weights_or_patterns():
    model = llama()
    every = find_layers(model, ["Linear"], [])
    assert len(every) == 22
    assert find_layers(model, ["model.layers.1"], []).keys() == {
        name for name in every if name.startswith("model.layers.1.")
    }
    assert len(find_layers(model, ["LlamaMLP"], ["re:.*down_proj"])) == 6
    assert list(find_layers(model, ["model.layers.0.mlp.up_proj.weight"], [])) == [
        "model.layers.0.mlp.up_proj"
    ]
    assert len(find_layers(model, ["re:.*q_proj.weight$"], [])) == 3
    with pytest.raises(ConfigError, match=r"'re:\.\*nothing' matches no prunable layer"):
        find_layers(model, ["Linear", "re:.*nothing"], [])
    with pytest.raises(ConfigError, match="are ignored"):
        find_layers(model, ["lm_head"], ["lm_head"])
    tied = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))
    with pytest.raises(ConfigError, match="lm_head: tied weights"):
        find_layers(tied, ["Linear"], [])


def test_shares_may_differ_by_block_and_by_target():
    model = llama()
    layers = find_layers(model, ["Linear"], ["lm_head"])
    assert {per_block(model, layers, [0.1, 0.2, 0.3])[name] for name in layers} == {0.1, 0.2, 0.3}
    shares = per_target(layers, {"Linear": 0.5, "re:.*mlp": 0.7, "model.layers.0.mlp.up_proj": 0})
    assert shares["model.layers.0.self_attn.q_proj"] == 0.5
    assert shares["model.layers.1.mlp.up_proj"] == 0.7
    assert shares["model.layers.0.mlp.up_proj"] == 0
    with pytest.raises(ConfigError, match=r"one sparsity per block \(3\), got 2"):
        per_block(model, layers, [0.1, 0.2])
    with pytest.raises(ConfigError, match="lm_head: outside of the repeated blocks"):
        per_block(model, find_layers(model, ["Linear"], []), [0.1, 0.2, 0.3])
    with pytest.raises(ConfigError, match="no sparsity matches"):
        per_target(layers, {"re:.*mlp": 0.7})
    with pytest.raises(ConfigError, match="conflicting sparsities"):
        per_target(layers, {"Linear": 0.5, "re:.*mlp": 0.7, "re:.*up_proj": 0.6})
    with pytest.raises(ConfigError, match=r"'re:\.\*mlb' matches no layer"):
        per_target(layers, {"Linear": 0.5, "re:.*mlb": 0.7})


def test_blocks_with_outliers_are_pruned_less():
    model = llama()
    with torch.no_grad():
        for layer in model.model.layers[1].modules():
            if isinstance(layer, nn.Linear):
                layer.weight[:, :3] *= 30
    layers = find_layers(model, ["Linear"], ["lm_head"])
    shares = by_outliers(model, layers, 0.6, batches=batches(), times=5, limit=0.08)
    blocks = [shares[f"model.layers.{i}.mlp.up_proj"] for i in range(3)]
    assert blocks[1] < 0.6 < min(blocks[0], blocks[2])
    assert sum(blocks) / 3 == pytest.approx(0.6)
    assert max(blocks) - min(blocks) == pytest.approx(0.16)


def test_invalid_input_raises():
    with pytest.raises(ConfigError, match="are not divisible into groups"):
        sparsegpt(random(4, 6), torch.eye(6), 0.5, structure=Groups(2, 4))
    with pytest.raises(ConfigError, match="does not divide into blocks"):
        sparsegpt(random(4, 6), torch.eye(6), 0.5, structure=Blocks(3, 3))
    with pytest.raises(ConfigError, match="expected a finite Hessian"):
        sparsegpt(random(4, 6), torch.eye(5), 0.5)
    model = llama()
    with pytest.raises(ConfigError, match="needs calibration data"):
        prune_model(model, {"lm_head": 0.5}, method=Wanda())
    model.lm_head.weight.data[0, 0] = torch.nan
    with pytest.raises(ConfigError, match="lm_head: NaN"):
        prune_model(model, {"lm_head": 0.5}, method=Magnitude())
