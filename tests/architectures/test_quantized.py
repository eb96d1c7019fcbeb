"""Quantized folders of every model type load elsewhere as we rounded them, or are refused."""

import pytest
import torch
from architectures import catalogue, results
from architectures.quantized import SCHEMES, Expected, check_quantized
from architectures.stock import StockProcess
from architectures.sweep import check_type, find_model

pytestmark = [
    pytest.mark.interop,
    pytest.mark.filterwarnings("ignore"),  # of models, while they are built
]


@pytest.fixture(scope="module")
def stock():
    with StockProcess() as process:
        yield process


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model_type", ["llama", "bert", "llava", "swinv2", "ctrl"])
def test_a_quantized_folder_loads_without_us(tmp_path, model_type, scheme, stock):
    model = catalogue.find(model_type).build(torch.bfloat16)
    outcome = check_quantized(model, scheme, tmp_path, stock)
    assert outcome.result == "right", outcome


@pytest.mark.parametrize("name", ["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])
def test_a_weight_that_is_neither_dense_nor_rounded_is_found(name):
    model = catalogue.find("llama").build(torch.bfloat16)
    info = {"missing_keys": set(), "unexpected_keys": set(), "mismatched_keys": set()}
    expected = Expected(model, info, SCHEMES["int8"].weights, torch.bfloat16)
    state = model.state_dict()
    assert expected.compare(state, info) == []
    assert expected.compare(state | {name: state[name] * 2}, info) == [f"weights: {name} (1)"]


@pytest.mark.long
@pytest.mark.parametrize("model_type", catalogue.list_model_types())
def test_every_type_loads_without_us(model_type, stock):
    try:
        tiny = find_model(model_type)
    except catalogue.CannotBuildError as error:
        assert "class" not in results.read_types()[model_type], "built when it was recorded"
        pytest.skip(str(error))
    found = check_type(tiny, SCHEMES, stock)
    recorded = results.read_types()[model_type]
    for scheme, outcome in found.items():
        assert outcome["result"] != "wrong", outcome
        assert outcome["result"] == recorded.get(scheme, outcome)["result"], outcome
