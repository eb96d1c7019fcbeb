"""Every example runs, and prints what it says it prints."""

import runpy
from pathlib import Path
from textwrap import dedent

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(set(EXAMPLES.glob("*.py")) - {EXAMPLES / "pool_on_ray.py"})
"""That of Ray, which the other tests do not need, runs in tests/sync."""


def promised(script):
    """The output in the docstring of a script."""
    text = script.read_text().split('"""')[1]
    return dedent(text.partition("Prints:\n\n")[2])


def test_there_are_examples():
    assert len(SCRIPTS) >= 6


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_a_script_prints_what_it_says(script, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out == promised(script)
