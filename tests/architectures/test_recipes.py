"""Recipes on tiny models of many architectures."""

from functools import cache
from pathlib import Path

import pytest
import torch
from architectures import catalogue, results
from architectures.recipes import (
    GROUPS,
    KINDS,
    RECIPES,
    check_hessians,
    check_recipe,
    check_recipes,
    copy_tensors,
    count_calls,
    list_types,
    make_batches,
)
from strategies import same_bits

from slimtensors.errors import ConfigError
from slimtensors.recipe import GPTQ, SparseGPT
from slimtensors.transformers import oneshot

VARIED = {
    "qwen3_moe": "causal",  # stacked experts
    "gpt_oss": "causal",  # stacked experts that checkpoints store transposed
    "granitemoe": "causal",  # experts, and a cache that forward does not name
    "jamba": "causal",  # blocks of several classes
    "gpt2": "causal",  # Conv1D
    "bert": "masked",  # an output layer with a tied weight, and a name of its own
    "albert": "masked",  # one block that runs several times
    "xlm": "masked",  # parallel lists of layers
    "t5": "seq2seq",
    "vit": "image",
    "llava": "vision-language",
}


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: these models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@cache
def find(model_type):
    """Return a tiny model, and data for it."""
    tiny = catalogue.find(model_type, VARIED[model_type])
    return tiny, make_batches(tiny.build())


@pytest.mark.parametrize("model_type", VARIED)
def test_recipes_are_right_for_varied_architectures(model_type, tmp_path):
    tiny, batches = find(model_type)
    for i, name in enumerate(RECIPES):
        outcome = check_recipe(tiny.build, batches, name, tmp_path / str(i))
        assert (outcome.result, outcome.reasons) == ("right", [])
        assert outcome.changed > outcome.untouched


@pytest.mark.parametrize("model_type", VARIED)
def test_layers_are_calibrated_on_their_inputs_in_the_finished_model(model_type):
    tiny, batches = find(model_type)
    assert check_hessians(tiny.build, batches) == []


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted({x for kind in KINDS for x in list_types(kind)}))
def test_recipes_are_right_or_refused_for_every_type(model_type, tmp_path):
    outcomes = check_recipes(model_type, tmp_path)
    if not outcomes:
        pytest.skip("no model of this type runs")
    for name, outcome in outcomes.items():
        assert outcome["result"] != "wrong", outcome
        recorded = results.read_types()[model_type].get(name, outcome)
        assert outcome["result"] == recorded["result"], outcome


def test_all_problems_are_reported_before_the_model_runs(tmp_path):
    tiny = catalogue.find("llama", "causal")
    model = tiny.build()
    for layer in model.model.layers:
        layer.mlp.gate_proj = torch.nn.Linear(62, 128)
        layer.mlp.up_proj = torch.nn.Linear(62, 128)
    before, calls = copy_tensors(model), count_calls(model)
    batches = make_batches(tiny.build())
    recipe = [SparseGPT(mask_structure="2:4"), GPTQ(config_groups=GROUPS)]
    with pytest.raises(ConfigError) as caught:
        oneshot(model, recipe, batches, output_dir=tmp_path / "model")
    for i in range(2):
        for layer in ("gate_proj", "up_proj"):
            assert str(caught.value).count(f"model.layers.{i}.mlp.{layer}") >= 2
    assert "SparseGPT" in str(caught.value)
    assert "GPTQ: " in str(caught.value)
    assert calls == []
    assert all(same_bits(x, before[name]) for name, x in copy_tensors(model).items())
    assert not Path(tmp_path, "model").exists()
