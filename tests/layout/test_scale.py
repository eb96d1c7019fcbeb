"""The tables of docs/scale.md are what benchmarks/scale.py computes, and that is what is done."""

import importlib.util
import sys
from pathlib import Path

import pytest

from slimtensors.archive import workers
from slimtensors.making import division

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "scale.py"


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("scale", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scale"]


def test_the_tables_are_those_that_the_script_computes(scale):
    assert scale.tables() in (ROOT / "docs" / "scale.md").read_text()


def test_the_script_knows_the_limits_of_the_library(scale):
    assert scale.LEAST == division.LEAST
    assert scale.IN_FLIGHT == workers._IN_FLIGHT


def test_shares_are_those_of_the_tables(scale):
    for model in scale.MODELS:
        size = int(model.nbytes / model.files)
        tensor = size // 50
        names = [[f"{i}.{j}" for j in range(50)] for i in range(model.files)]
        files = [
            division.File(f"{i}", dict.fromkeys(some, tensor), dict.fromkeys(some, (4096, 8)))
            for i, some in enumerate(names)
        ]
        for count in scale.COUNTS:
            done = division.divide(files, count)
            assert bool(done.joins) == scale.is_cut(model, count), (model.name, count)
            most = max(sum(task.nbytes for task in tasks) for tasks in done.tasks)
            cost = scale.compress(model, count, scale.STATED)
            share = cost.read - cost.joined
            assert 0.99 * share <= most <= 1.5 * share + division.LEAST, (model.name, count)
            assert len(set(done.joins.values())) == len(done.joins)
