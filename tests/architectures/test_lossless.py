"""Lossless folders of every model type load as the dense ones do."""

import pytest
import torch
from architectures import catalogue, results
from architectures.lossless import check_lossless
from architectures.stock import StockProcess
from architectures.sweep import check_type, find_model

pytestmark = pytest.mark.filterwarnings("ignore")  # of models, while they are built and run


@pytest.mark.parametrize(
    ("model_type", "dtype", "by_folder"),
    [
        ("llama", torch.float32, True),
        ("bert", torch.bfloat16, False),  # tied
        ("t5", torch.float32, False),  # encoder and decoder
        ("mixtral", torch.bfloat16, True),  # merged experts
        ("llava", torch.bfloat16, False),  # renamed weights
        ("dinov2", torch.float32, True),
        ("granite_speech5_encoder", torch.bfloat16, True),  # integers loaded as float32
    ],
)
def test_a_lossless_folder_loads_as_the_dense_one(tmp_path, model_type, dtype, by_folder):
    model = catalogue.find(model_type).build(dtype)
    inputs = catalogue.make_inputs(model)
    assert check_lossless(model, inputs, tmp_path, by_folder=by_folder) == []


@pytest.mark.long
@pytest.mark.parametrize("model_type", catalogue.list_model_types())
def test_every_type_loads_as_the_dense_one(model_type):
    try:
        tiny = find_model(model_type)
    except catalogue.CannotBuildError as error:
        assert "class" not in results.read_types()[model_type], "built when it was recorded"
        pytest.skip(str(error))
    outcome = check_type(tiny, ["lossless"], StockProcess())["lossless"]
    assert outcome["result"] == "right", outcome
