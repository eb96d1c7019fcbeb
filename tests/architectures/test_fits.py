"""Fitting tiny models of many architectures to a budget."""

import pytest
import torch
from architectures import catalogue
from architectures.fits import check_fit
from architectures.recipes import KINDS, list_types

pytestmark = pytest.mark.filterwarnings("ignore")  # of models, while they are built and run


@pytest.fixture(autouse=True)
def one_thread():
    """Run on one thread: these models are too small for more."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "model_type",
    [
        "llama",
        "gpt2",  # Conv1D
        "gpt_oss",  # stacked experts that checkpoints store transposed
        "mixtral",  # experts that are merged on load, some without inputs
        "bert",  # an output layer with a tied weight, and a name of its own
        "t5",  # encoder and decoder
        "llava",  # a tower whose last layer is not used
        "mamba",
    ],
)
def test_varied_architectures_fit_a_budget(model_type, tmp_path):
    assert check_fit(model_type, tmp_path) == ("right", [])


@pytest.mark.long
@pytest.mark.parametrize("model_type", sorted({x for kind in KINDS for x in list_types(kind)}))
def test_every_type_fits_or_is_refused(model_type, tmp_path):
    try:
        result, reasons = check_fit(model_type, tmp_path)
    except catalogue.CannotBuildError as error:
        pytest.skip(str(error))
    assert result != "wrong", reasons
