"""The examples in docstrings run."""

import doctest

import pytest

from slimtensors.checkpoint import loop, profiles, state, store
from slimtensors.checkpoint.distributed import folders, reader, writer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "module", [state, profiles, store, loop, writer, reader, folders], ids=lambda m: m.__name__
)
def test_examples_in_docstrings_run(module, tmp_path, monkeypatch):
    import torch

    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
