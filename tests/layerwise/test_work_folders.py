"""Work folders that are not what a run has left."""

import json

import pytest
import torch

from slimtensors.errors import FormatError
from slimtensors.layerwise.resume import INDEX_FILE, WorkFolder

pytestmark = pytest.mark.hostile

DIGESTS = {"model": "1", "config": "2"}


def make(folder):
    work = WorkFolder(folder, DIGESTS)
    work.store("a", {"w": torch.ones(3)}, {"error": 0.5})
    return json.loads((folder / INDEX_FILE).read_text())


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.update(version=[]),
        lambda state: state.update(made_of=[]),
        lambda state: state.update(finished=["a"]),
        lambda state: state["finished"].update(a="00000.safetensors"),
        lambda state: state["finished"]["a"].update(file=7),
        lambda state: state["finished"]["a"].update(file="../x"),
        lambda state: state["finished"]["a"].update(file="/etc/passwd"),
        lambda state: state["finished"]["a"].update(file=".."),
        lambda state: state["finished"]["a"].update(report=[1]),
        lambda state: state["finished"]["a"].update(file="gone.safetensors"),
        lambda state: state["finished"]["a"].update(file="x" * 300),
    ],
)
def test_a_malformed_index_is_refused_with_its_path(tmp_path, change):
    state = make(tmp_path)
    change(state)
    (tmp_path / INDEX_FILE).write_text(json.dumps(state))
    with pytest.raises(FormatError) as caught:
        WorkFolder(tmp_path, DIGESTS).load("a")
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "7", "[" * 100_000, "9" * 5000])
def test_an_index_that_is_not_an_object_is_refused(tmp_path, text):
    make(tmp_path)
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(FormatError, match=INDEX_FILE):
        WorkFolder(tmp_path, DIGESTS)
