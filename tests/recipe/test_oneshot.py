"""Recipes in one shot: pruning and quantization in any order, saving, reports."""

import json
import math
from dataclasses import replace
from itertools import permutations

import pytest
import torch
from strategies import same_bits
from tiny_models import bert, mixtral, same_weights
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    RobertaConfig,
    RobertaForMaskedLM,
)

from slimtensors.errors import ConfigError, MismatchError
from slimtensors.recipe import (
    AWQ,
    GPTQ,
    ConstantPruning,
    GradualMagnitudePruning,
    MagnitudePruning,
    Quantize,
    Recipe,
    SmoothQuant,
    SparseGPT,
    Stage,
    Wanda,
)
from slimtensors.recipe import oneshot as oneshot_module
from slimtensors.recipe.calibration import Calibration
from slimtensors.recipe.oneshot import apply_recipe
from slimtensors.recipe.report import measure
from slimtensors.transformers.auto import SparseAutoModelForCausalLM
from slimtensors.transformers.oneshot import oneshot

WIDE_GROUPS = {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 128}}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}}
ASYMMETRIC = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "group_size": 16, "symmetric": False},
    }
}
TEXT = ["the quick brown fox jumps over the lazy dog and runs away " * 4] * 6
FEW = Calibration(samples=6, length=16, batch_size=3)


def llama(dtype=torch.float32, layers=2, **sizes):
    torch.manual_seed(0)
    default = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=64, num_hidden_layers=layers, **default | sizes)
    return LlamaForCausalLM(config).to(dtype).eval()


def batches():
    random = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(64, (2, 12), generator=random)} for _ in range(3)]


def tokenizer():
    words = dict.fromkeys(" ".join(TEXT).split())
    known = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["?", *words])}, unk_token="?"))
    known.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=known, unk_token="?")


def linears(model):
    return {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) and name != "lm_head"
    }


def zeros(model):
    return {name: layer.weight == 0 for name, layer in linears(model).items()}


PRUNERS = [
    MagnitudePruning(0.6),
    Wanda(0.5),
    SparseGPT(mask_structure="2:4"),
    SparseGPT(0.7, block_size=8),
    Wanda(mask_structure="8:16"),
]
QUANTIZERS = [
    [Quantize(config_groups=GROUPS)],
    [GPTQ(config_groups=ASYMMETRIC)],
    [AWQ(config_groups=GROUPS)],
    [SmoothQuant(0.6), GPTQ("W8A8")],
]


@pytest.mark.parametrize("pruner", PRUNERS, ids=lambda x: type(x).__name__ + x.mask_structure)
@pytest.mark.parametrize("quantizers", QUANTIZERS, ids=lambda x: type(x[-1]).__name__)
def test_zeros_are_preserved_in_every_order(pruner, quantizers):
    *before, last = quantizers
    orders = [
        ([pruner, *before, last], torch.float32),
        ([*before, last, pruner], torch.bfloat16),
        ([*before, pruner, last], torch.bfloat16),
    ]
    for order, dtype in orders if before else orders[:2]:
        model = llama(dtype, layers=1)
        after_pruning = {}

        def start(name, model=model, seen=after_pruning):
            seen[name] = zeros(model)

        steps = apply_recipe(model, Recipe.of(order), batches(), start=start)
        masks = after_pruning.get(type(quantizers[-1]).__name__)
        share = pruner.sparsity
        for name, now in zeros(model).items():
            assert now.float().mean() > share - 0.01
            assert (now | ~masks[name]).all()
            if pruner.mask_structure != "unstructured":
                kept, size = map(int, pruner.mask_structure.split(":"))
                assert ((~now).view(-1, size).sum(1) <= kept).all()
        for layer in linears(model).values():
            state = layer.quantization
            assert torch.equal(state.dense_weight(state.plan.weights[0]), layer.weight)
        assert {step.modifier for step in steps} == {
            type(pruner).__name__,
            type(quantizers[-1]).__name__,
        }


def test_zeros_of_several_pruners_accumulate():
    for order in permutations(
        [SparseGPT(mask_structure="2:4"), Wanda(0.6), MagnitudePruning(0.55)]
    ):
        model = llama(layers=1)
        apply_recipe(model, Recipe.of(order), batches())
        for now in zeros(model).values():
            assert now.float().mean() > 0.59
            assert ((~now).view(-1, 4).sum(1) <= 2).all()


def test_a_modifier_that_changes_pruned_weights_raises(monkeypatch):
    model = llama()

    prune = oneshot_module._prune

    def prune_and_break(model, modifier, context):
        step = prune(model, modifier, context)
        next(iter(linears(model).values())).weight.data += 1e-3
        return step

    monkeypatch.setattr(oneshot_module, "_prune", prune_and_break)
    recipe = Recipe.of([MagnitudePruning(0.5, targets="re:.*mlp"), Wanda(0.5, targets="re:.*mlp")])
    apply_recipe(model, recipe, batches())  # the changed layer has no zeros
    model.model.layers[0].self_attn.q_proj.weight.data[:8] = 0
    with pytest.raises(MismatchError, match=r"q_proj: MagnitudePruning changed 256 pruned weights"):
        apply_recipe(model, recipe, batches())


def test_constant_pruning_preserves_even_a_few_zeros():
    model = llama()
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data[0, :3] = 0
    report = apply_recipe(model, Recipe.of([ConstantPruning(), Quantize("W8A8")]), batches())
    assert not weight[0, :3].any()
    assert report[0].layers == ()


class OwnLinear(nn.Module):
    """A linear layer of another class than `nn.Linear`."""

    def __init__(self, layer):
        super().__init__()
        self.weight = nn.Parameter(layer.weight.detach().clone())

    def forward(self, x):
        return x @ self.weight.T


def test_linear_layers_of_other_classes_are_reported_as_unchanged():
    model = llama(layers=1)
    mlp = model.model.layers[0].mlp
    mlp.up_proj = OwnLinear(mlp.up_proj)
    before = mlp.up_proj.weight.clone()
    _, report = oneshot(model, [Wanda(0.5)], batches())
    name = "model.layers.0.mlp.up_proj"
    reasons = {layer.name: (layer.weights, layer.reason) for layer in report.unchanged}
    assert reasons[name] == (64 * 32, "OwnLinear is not supported")
    assert name in str(report)
    assert torch.equal(mlp.up_proj.weight, before)


@pytest.mark.parametrize("recipe", [[Wanda(0.5)], [GPTQ(config_groups=GROUPS)]])
def test_layers_with_weight_norm_are_left_alone_and_reported(recipe):
    model = llama(layers=1)
    weight_norm(model.model.layers[0].mlp.up_proj)
    model.extra = weight_norm(nn.Conv1d(4, 4, 3))
    _, report = oneshot(model, recipe, batches())
    reasons = {layer.name: layer.reason for layer in report.unchanged}
    assert reasons["model.layers.0.mlp.up_proj"] == "ParametrizedLinear is not supported"


@pytest.mark.parametrize("recipe", [[Wanda(0.5)], [GPTQ(config_groups=GROUPS)]])
def test_empty_layers_are_left_alone_and_reported(recipe):
    model = llama(layers=1)
    model.model.layers[0].mlp.extra = extra = nn.Linear(32, 1)
    extra.weight = nn.Parameter(torch.empty(0, 32))
    _, report = oneshot(model, recipe, batches())
    reasons = {layer.name: layer.reason for layer in report.unchanged}
    assert reasons["model.layers.0.mlp.extra"] == "empty"


def test_a_layer_beside_the_output_layer_is_pruned():
    config = RobertaConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64
    )
    model, report = oneshot(RobertaForMaskedLM(config), [MagnitudePruning(0.5)])
    assert model.lm_head.dense.weight.eq(0).float().mean() == pytest.approx(0.5, abs=0.01)
    reasons = {layer.name: layer.reason for layer in report.unchanged}
    assert reasons.keys() == {"lm_head.decoder"}


def test_a_pruned_model_is_saved_sparse_and_loads_unchanged(tmp_path):
    recipe = [SparseGPT(0.6)]
    model, report = oneshot(llama(), recipe, batches(), output_dir=tmp_path)
    assert report.format == "bitmask"
    assert report.sparsity == pytest.approx(0.6, abs=0.01)
    assert same_weights(SparseAutoModelForCausalLM.from_pretrained(tmp_path), model)
    assert Recipe.load(tmp_path / "recipe.yaml") == Recipe.of(recipe)
    saved = json.loads((tmp_path / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_json()))
    assert saved["format"] == "bitmask"
    assert saved["stored_bytes"] > 0
    assert {layer["structure"] for layer in saved["layers"]} == {"unstructured"}
    assert all(layer["bits"] < 32 for layer in saved["layers"])
    assert [step["modifier"] for step in saved["steps"]] == ["SparseGPT"]
    assert all(0 < layer["cosine"] < 1 for layer in saved["steps"][0]["layers"])


@pytest.mark.parametrize(
    ("recipe", "format"),
    [
        ([GPTQ(config_groups=GROUPS)], "pack-quantized"),
        ([Quantize("FP8_DYNAMIC")], "float-quantized"),
        ([Wanda(0.6), GPTQ("W8A8")], "int-quantized"),
        ([SparseGPT(mask_structure="2:4"), GPTQ(config_groups=GROUPS)], "slim"),
        ([GPTQ(config_groups=GROUPS), Wanda(0.6)], "slim"),
    ],
)
def test_a_quantized_model_is_saved_as_codes(tmp_path, recipe, format):
    model, report = oneshot(llama(), recipe, batches(), output_dir=tmp_path / "made")
    assert report.format == format
    again = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "made")
    assert same_weights(again, model)
    assert all(layer.bits < 12 for layer in report.layers)
    assert Recipe.load(tmp_path / "made" / "recipe.yaml") == Recipe.of(recipe)
    assert not hasattr(model.config, "quantization_config")


def test_a_model_can_be_saved_dense(tmp_path):
    model, report = oneshot(
        llama(), GPTQ(config_groups=GROUPS), batches(), output_dir=tmp_path, save_compressed=False
    )
    assert report.format == "dense"
    assert same_weights(AutoModelForCausalLM.from_pretrained(tmp_path), model)


def test_a_compressed_folder_is_loaded_with_its_tokenizer(tmp_path):
    folder = tmp_path / "made"
    first, _ = oneshot(
        llama(), SparseGPT(0.5), TEXT, output_dir=folder, calibration=FEW, tokenizer=tokenizer()
    )
    (tmp_path / "text.txt").write_text("\n".join(TEXT))
    model, report = oneshot(
        folder,
        GPTQ(config_groups=GROUPS),
        tmp_path / "text.txt",
        output_dir=tmp_path / "again",
        calibration=FEW,
    )
    assert report.format == "slim"
    masks = zeros(first)
    assert all((now | ~masks[name]).all() for name, now in zeros(model).items())
    assert (tmp_path / "again" / "tokenizer.json").exists()
    third, _ = oneshot(tmp_path / "again", Wanda(0.7), TEXT, calibration=FEW)
    assert all((now | ~masks[name]).all() for name, now in zeros(third).items())


def test_quality_is_measured_with_evaluation_data():
    calibration = Calibration(evaluate=batches())
    _, report = oneshot(llama(), Wanda(0.7), batches(), calibration=calibration)
    before, after = report.quality.perplexity
    assert before > 1
    assert after > 1
    assert report.quality.kl > 0
    assert 0 < report.quality.cosine < 1
    _, none = oneshot(llama(), MagnitudePruning(0.0), calibration=calibration)
    assert none.quality.perplexity == (before, before)
    assert none.quality.kl == pytest.approx(0, abs=1e-6)
    _, encoder = oneshot(bert(), MagnitudePruning(0.7), calibration=Calibration(evaluate=batches()))
    assert encoder.quality.perplexity is None
    assert 0 < encoder.quality.cosine < 1


def test_padding_and_ignored_labels_are_excluded_from_quality():
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))
    side, zeros = torch.ones_like(ids), torch.zeros_like(ids)
    padded = {
        "input_ids": torch.cat([ids, zeros], 1),
        "attention_mask": torch.cat([side, zeros], 1),
    }
    model = llama()
    plain, filled = measure(model, [{"input_ids": ids}]), measure(model, [padded])
    assert filled.perplexity == pytest.approx(plain.perplexity, rel=1e-4)
    assert torch.allclose(filled.outputs, plain.outputs, atol=1e-4)
    labels = ids.clone()
    labels[:, :6] = -100
    labelled = {"input_ids": ids, "labels": labels}
    loss = model(**labelled).loss.item()
    assert measure(model, [labelled]).perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_columns_that_the_model_does_not_accept_are_dropped_and_noted():
    rows = [{**batch, "idx": torch.arange(2), "text": ["a", "b"]} for batch in batches()]
    model, report = oneshot(llama(), [SparseGPT(0.5)], rows)
    assert "columns that the model does not accept are ignored: idx, text" in report.notes
    calibration = Calibration(samples=6, evaluate=rows[:1])
    notes = oneshot(llama(), [SparseGPT(0.5)], batches(), calibration=calibration)[1].notes
    assert list(notes) == [
        "evaluate: 2 samples of calibration data, not 6",
        "evaluate: columns that the model does not accept are ignored: idx, text",
    ]
    assert same_weights(model, oneshot(llama(), [SparseGPT(0.5)], batches())[0])


def test_a_model_compressed_in_memory_raises(tmp_path):
    oneshot(llama(), Quantize(config_groups=GROUPS), output_dir=tmp_path)
    model = SparseAutoModelForCausalLM.from_pretrained(tmp_path, run_compressed=True)
    for compressed in (model, AutoModelForCausalLM.from_pretrained(tmp_path)):
        with pytest.raises(ConfigError, match="q_proj: the weight is compressed in memory"):
            oneshot(compressed, MagnitudePruning(0.5))


def test_estimated_bits_are_marked(tmp_path):
    recipe = MagnitudePruning(0.8, targets=["Linear", "re:.*experts.*"])
    _, kept = oneshot(mixtral(), recipe)
    assert not any(layer.is_stored for layer in kept.layers)
    _, report = oneshot(mixtral(), recipe, output_dir=tmp_path / "out")
    stored = {layer.name: layer.is_stored for layer in report.layers}
    assert stored["model.layers.0.self_attn.q_proj"]
    assert not stored[
        "model.layers.0.mlp.experts.down_proj"
    ]  # experts are stored under other names
    rows = [line.split() for line in report.format_layers().splitlines()]
    assert all(row[3].startswith("~") != stored[row[0]] for row in rows if row[0] in stored)


def test_a_report_is_printed_as_a_summary_of_ten_lines():
    model = llama()
    calibration = Calibration(evaluate=batches())
    recipe = [Wanda(0.5, ignore=["lm_head", "re:.*nothing"]), Quantize("W8A8")]
    report = oneshot(model, recipe, batches(), calibration=calibration)[1]
    head, *rows = report.format_layers().splitlines()
    assert head.split() == ["layer", "structure", "zeros", "bits", "Wanda", "Quantize", "seconds"]
    assert len([row for row in rows if row.startswith("model.layers.")]) == 14
    text = str(report)
    assert [line.partition(" in ")[0] for line in text.splitlines()[:2]] == [
        "Wanda: 14 layers",
        "Quantize: 14 layers",
    ]
    assert "14 changed layers: ~8." in text
    assert "perplexity" in text
    assert "note: 6 samples of calibration data, not 128" in text
    assert "note: ignore: 're:.*nothing' matches nothing in this model" in text
    many = replace(report, notes=tuple(f"note {i}" for i in range(99)))
    *_, last = lines = str(many).splitlines()
    assert len(lines) == 10
    rest = len(text.splitlines()) - len(report.notes) + 99 - 9
    assert last == f"{rest} more lines are in report.json"


def test_a_preset_in_a_recipe_uses_groups_that_fit(tmp_path):
    sizes = {"hidden_size": 96, "intermediate_size": 128}
    model = llama(**sizes)
    recipe = GPTQ({"W4A16": ["Linear"]})
    model, report = oneshot(model, recipe, batches(), output_dir=tmp_path / "out")
    found = {layer.name.rpartition(".")[2]: layer.group_size for layer in report.layers}
    assert found == {"down_proj": 128} | dict.fromkeys(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"), 32
    )
    assert "note: group size 32 instead of 128: 12 layers with 96 columns" in str(report)
    again = Recipe.load(tmp_path / "out" / "recipe.yaml")
    _, repeated = oneshot(llama(**sizes), again, batches())
    assert [x.group_size for x in repeated.layers] == [x.group_size for x in report.layers]
    loaded = SparseAutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, x in model.state_dict().items():
        assert same_bits(x, loaded.state_dict()[name]), name


def test_a_killed_run_resumes_from_its_work_folder(tmp_path, monkeypatch):
    recipe = [SparseGPT(0.5), SmoothQuant(), GPTQ(config_groups=GROUPS)]
    whole, expected = oneshot(llama(), recipe, batches())

    class KilledError(Exception):
        pass

    def kill(*_):
        raise KilledError

    started = []

    def start(name):
        started.append(name)
        return None if len(started) < 2 else lambda report, n, of: n == 9 and kill()

    with pytest.raises(KilledError):
        apply_recipe(llama(), Recipe.of(recipe), batches(), work=tmp_path, start=start)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["00-SparseGPT", "02-GPTQ"]
    again, report = oneshot(llama(), recipe, batches(), calibration=Calibration(work=tmp_path))
    assert same_weights(again, whole)
    assert [step.layers for step in report.steps] == [step.layers for step in expected.steps]
    with pytest.raises(MismatchError, match=r"SparseGPT: .* was started with a different config"):
        oneshot(llama(), [SparseGPT(0.6)], batches(), calibration=Calibration(work=tmp_path))


def test_stages_and_yaml_are_equivalent_to_objects():
    objects, _ = oneshot(llama(), [Wanda(0.5), GPTQ(config_groups=GROUPS)], batches())
    stages = [Stage([Wanda(0.5)], "sparsity", "oneshot"), Stage([GPTQ(config_groups=GROUPS)], "q")]
    assert same_weights(oneshot(llama(), stages, batches())[0], objects)
    assert same_weights(oneshot(llama(), Recipe(stages).to_yaml(), batches())[0], objects)


def test_mappings_select_the_norms_to_smooth():
    mapping = [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]
    dense, model = llama(), llama()
    smooth = SmoothQuant(0.8, mappings=[mapping], ignore=["model.layers.1.input_layernorm"])
    apply_recipe(model, Recipe.of([smooth, Quantize("W8A8")]), batches())
    changed = {
        name
        for name, x in dense.named_parameters()
        if "norm" in name and not torch.equal(x, model.get_parameter(name))
    }
    assert changed == {"model.layers.0.input_layernorm.weight"}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            Wanda(0.5, targets="re:.*nothing"),
            r"Wanda: target 're:\.\*nothing' matches no prunable layer",
        ),
        (Wanda(0.5, targets=["nothing", "none"]), r"'nothing' matches no .*\n.*'none' matches no"),
        (Quantize("W8A8", targets=["Nothing"]), "no layer of the model matches"),
        (SmoothQuant(), "must be followed by a quantizing modifier"),
        ([Quantize("W8A8"), GPTQ("W4A16")], "quantized only once"),
        ([Wanda(0.5), SmoothQuant(), AWQ(config_groups=GROUPS)], "use one of them"),
        (GradualMagnitudePruning(), "requires training"),
        (Stage([Wanda()], "late", "train"), "late_stage: requires train"),
        (
            SparseGPT(mask_structure="3:6"),
            "q_proj.*: 32 columns are not divisible into groups of 6",
        ),
        ([Wanda(0.5), Wanda(0.6, mask_structure="16x3")], "does not divide into blocks"),
        (
            [Wanda(0.5), GPTQ(config_groups={"group_0": WIDE_GROUPS})],
            "GPTQ: .*q_proj.*: 32 columns are not divisible.*fit: 32, 16, channel",
        ),
        ([Wanda(0.5), Quantize("W8A8", targets=["Nothing"])], "no layer of the model matches"),
        (
            AWQ(config_groups=GROUPS, mappings=[[["re:.*o_proj"], "re:.*v_proj"]]),
            "matches no norm",
        ),
        (
            [SmoothQuant(mappings=[[["re:.*x_proj"], "re:.*norm"]]), Quantize("W8A8")],
            "matches no layer",
        ),
    ],
)
def test_impossible_recipes_raise_before_changing_the_model(recipe, message):
    model = llama()
    with pytest.raises(ConfigError, match=message):
        oneshot(model, recipe, batches())
    assert same_weights(model, llama())


@pytest.mark.parametrize(
    ("recipe", "count"),
    [
        ([Wanda(0.5)], 1),
        ([GPTQ(config_groups=GROUPS)], 1),
        ([SparseGPT(0.5), Quantize(config_groups=GROUPS)], 2),
    ],
)
def test_weights_that_are_not_finite_raise_before_the_model_runs(recipe, count):
    model = llama()
    names = [f"model.layers.{i}.mlp.{part}" for i, part in ((0, "up_proj"), (1, "down_proj"))]
    for name in names:
        model.get_submodule(name).weight.data[1, 2] = float("nan")
    model.forward = None
    with pytest.raises(ConfigError, match="NaN or infinity") as caught:
        oneshot(model, recipe, batches())
    assert str(caught.value).count(", ".join(names)) == count


def test_missing_data_and_unsupported_models_raise(tmp_path):
    with pytest.raises(ConfigError, match="SparseGPT: needs calibration data"):
        oneshot(llama(), SparseGPT(0.5))
    with pytest.raises(ConfigError, match="Quantize: needs calibration data"):
        oneshot(llama(), Quantize("FP8"))
    with pytest.raises(ConfigError, match="is empty"):
        oneshot(llama(), SparseGPT(0.5), [])
    with pytest.raises(ConfigError, match="pass tokenizer"):
        oneshot(llama(), SparseGPT(0.5), TEXT)
    with pytest.raises(ConfigError, match="requires a model of transformers"):
        oneshot(nn.Sequential(nn.Linear(8, 8)), MagnitudePruning(0.5), output_dir=tmp_path)


def test_plain_modules_are_pruned_without_transformers():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 16))
    result, report = oneshot(model, MagnitudePruning(0.5))
    assert result is model
    assert [layer.sparsity for layer in report.layers] == [0.5, 0.5]
