"""A short run of `make fuzz`, on every kind of document."""

import pytest
from fuzzing.run import SHARES
from reliability_tools import TESTS, run_program

pytestmark = pytest.mark.hostile

RUN = TESTS / "fuzzing" / "run.py"


@pytest.mark.slow
def test_mutants_of_every_kind_are_refused_or_valid():
    """Another seed than that of `make fuzz`; the same in every run."""
    output = run_program(RUN, "--count", 4000, "--seed", "short", "--processes", 1, timeout=600)
    assert [line.split()[0] for line in output.splitlines()[1:]] == [
        *map(first_word, SHARES),
        "all",
    ]


def first_word(text: str) -> str:
    return text.split()[0]
