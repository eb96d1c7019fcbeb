"""Every notebook runs from top to bottom, and its cells print what is stored under them."""

import json

import pytest
from notebooks import EXAMPLES, code_cells, folder_for, outputs, stored

NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def test_there_are_notebooks():
    assert {path.stem for path in NOTEBOOKS} == {"bitmask_compression", "quantize_and_pack_int4"}


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_stored_in_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(folder_for(tmp_path))
    notebook = json.loads(path.read_text())
    for cell, text in zip(code_cells(notebook), outputs(notebook), strict=True):
        assert text == stored(cell), "".join(cell["source"])
