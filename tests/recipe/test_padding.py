"""Padding is removed from calibration data: results are the same as without it."""

from itertools import product

import pytest
import torch
from tiny_models import MODELS, bert, llama, mixtral, same_weights
from torch import nn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from slimtensors.errors import ConfigError
from slimtensors.layerwise.inputs import remove_padding
from slimtensors.quantization.state import get_quantization
from slimtensors.recipe import (
    AWQ,
    GPTQ,
    Recipe,
    SmoothQuant,
    SparseGPT,
    Wanda,
)
from slimtensors.recipe.calibration import Calibration
from slimtensors.recipe.oneshot import apply_recipe
from slimtensors.recipe.report import measure
from slimtensors.transformers.data import Examples, calibration_batches
from slimtensors.transformers.oneshot import oneshot

LENGTHS = (9, 5, 9)
W4 = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 32}}}
STATIC = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 8},
        "input_activations": {"num_bits": 8},
    }
}
RECIPES = {
    "pruned": [Wanda(0.6, sparsity_profile="owl"), SparseGPT(0.7)],
    "quantized": [AWQ(config_groups=W4)],
    "smoothed": [SmoothQuant(0.6), GPTQ(config_groups=STATIC)],
}


def rows():
    random = torch.Generator().manual_seed(5)
    return [torch.randint(1, 96, (length,), generator=random) for length in LENGTHS]


def plain():
    """Return the same rows in batches that need no padding."""
    long, short, other = rows()
    return [{"input_ids": short[None]}, {"input_ids": torch.stack([long, other])}]


def padded(side):
    """Return one batch in which every row has at least as much padding as tokens."""
    width = 2 * max(LENGTHS)

    def filled(row, value):
        fill = torch.full((width - len(row),), value)
        return torch.cat([fill, row] if side == "left" else [row, fill])

    return {
        "input_ids": torch.stack([filled(row, 7) for row in rows()]),
        "attention_mask": torch.stack([filled(torch.ones_like(row), 0) for row in rows()]),
    }


def input_scales(model):
    states = [get_quantization(module) for module in model.modules()]
    return [float(x.input_scale) for x in states if hasattr(x, "input_scale")]


@pytest.mark.parametrize(
    ("make", "recipe"), [*product([llama, bert], RECIPES), (mixtral, "pruned")]
)
def test_padding_does_not_change_the_result(make, recipe):
    expected = make()
    apply_recipe(expected, Recipe.of(RECIPES[recipe]), plain())
    assert bool(input_scales(expected)) == (recipe == "smoothed")
    for side in ("left", "right"):
        found = make()
        apply_recipe(found, Recipe.of(RECIPES[recipe]), [padded(side)])
        assert same_weights(found, expected)
        assert input_scales(found) == input_scales(expected)


def test_padding_without_a_mask_changes_the_result():
    expected, found = llama(), llama()
    apply_recipe(expected, Recipe.of([Wanda(0.7)]), plain())
    apply_recipe(found, Recipe.of([Wanda(0.7)]), [{"input_ids": padded("right")["input_ids"]}])
    assert not same_weights(found, expected)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("make", [llama, bert])
def test_padding_is_excluded_from_quality(make, side):
    model = make()
    expected, found = measure(model, plain()), measure(model, [padded(side)])
    assert found.perplexity == expected.perplexity
    assert torch.equal(found.outputs, expected.outputs)


def test_padding_of_a_loader_is_removed():
    whole = padded("right")
    items = [{name: x[i] for name, x in whole.items()} for i in range(len(LENGTHS))]
    loader = DataLoader(items, batch_size=3)
    _, report = oneshot(llama(), [SparseGPT(0.5)], loader, calibration=Calibration(samples=3))
    assert {layer.tokens for layer in report.steps[0].layers} == {sum(LENGTHS)}


class Unmasked(LlamaForCausalLM):
    """A model without an argument for the mask."""

    def forward(self, input_ids, **settings):
        assert not settings
        return super().forward(input_ids)


def unmasked():
    model = llama()
    model.__class__ = Unmasked
    return model


def test_padding_is_removed_for_a_model_without_a_mask_argument():
    calibration = Calibration(evaluate=[padded("right")])
    _, report = oneshot(unmasked(), [SparseGPT(0.5)], [padded("right")], calibration=calibration)
    assert {layer.tokens for layer in report.steps[0].layers} == {sum(LENGTHS)}
    assert "columns that the model does not accept are ignored: attention_mask" in report.notes
    whole = padded("right")
    items = [{name: x[i] for name, x in whole.items()} for i in range(len(LENGTHS))]
    for collate in (None, lambda rows: torch.utils.data.default_collate(rows)):
        found = calibration_batches(Examples(items, collate), unmasked(), None)
        assert [{*batch} for batch in found] == [{"input_ids"}] * 2
        assert torch.equal(found[0]["input_ids"], plain()[0]["input_ids"])
        assert torch.equal(found[1]["input_ids"], plain()[1]["input_ids"])


def test_all_arguments_of_padding_tokens_are_removed():
    batch = padded("left")
    count, width = batch["input_ids"].shape
    places = torch.arange(width).expand(count, width)
    more = {"position_ids": places, "label": torch.arange(count), "scale": 2.0}
    short, long = remove_padding(nn.Linear(1, 1), [{**batch, **more}])
    assert torch.equal(long["input_ids"], torch.stack([rows()[0], rows()[2]]))
    assert torch.equal(short["position_ids"], places[:1, -5:])
    assert long["label"].tolist() == [0, 2]
    assert short["label"].tolist() == [1]
    assert short["scale"] == 2.0
    assert all(part["attention_mask"].all() for part in (short, long))


def test_batches_without_padding_are_returned_unchanged():
    full = {"input_ids": torch.ones(2, 3), "attention_mask": torch.ones(2, 3)}
    originals = [full, torch.ones(2, 3), [torch.ones(2, 3)], {"x": torch.ones(2)}]
    found = remove_padding(nn.Linear(1, 1), originals)
    assert all(a is b for a, b in zip(found, originals, strict=True))
    decoding = [padded("right") | {"decoder_input_ids": torch.ones(3, 18)}]
    assert remove_padding(MODELS["t5"][0](), decoding)[0] is decoding[0]


def test_a_batch_that_cannot_be_split_raises():
    patches = padded("right") | {"pixel_values": torch.ones(8, 3)}
    with pytest.raises(ConfigError, match="pixel_values has 8 rows but attention_mask has 3"):
        remove_padding(nn.Linear(1, 1), [patches])


def test_a_single_sample_may_have_other_arguments():
    whole = padded("right")
    alone = {name: x[1:2] for name, x in whole.items()}
    more = {"pixel_values": torch.ones(8, 3), "grid": torch.ones(1, 3), "label": torch.ones(1)}
    (found,) = remove_padding(nn.Linear(1, 1), [alone | more])
    assert torch.equal(found["input_ids"], plain()[0]["input_ids"])
    assert all(found[name] is x for name, x in more.items())


def test_shared_positions_are_selected_for_each_row():
    batch = padded("left")
    places = torch.arange(batch["input_ids"].shape[1])
    short, long = remove_padding(nn.Linear(1, 1), [batch | {"position_ids": places[None]}])
    assert torch.equal(short["position_ids"], places[None, -5:])
    assert torch.equal(long["position_ids"], places[-9:].expand(2, 9))


def test_a_mask_without_tokens_raises():
    nothing = {"input_ids": torch.ones(2, 3), "attention_mask": torch.zeros(2, 3)}
    with pytest.raises(ConfigError, match="attention_mask excludes every token"):
        remove_padding(nn.Linear(1, 1), [nothing])
    assert len(remove_padding(nn.Linear(1, 1), [nothing, *plain()])) == 2
