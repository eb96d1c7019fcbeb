"""A short run of `make fuzz` on every kind of document, and what it would find."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import pytest
import torch
from fuzzing.kinds import Kind, Mutant
from fuzzing.run import SHARES
from fuzzing.worker import MEMORY, address_space, run_limited
from reliability_tools import TESTS, run_program

from slimtensors.errors import FormatError

pytestmark = pytest.mark.hostile

RUN = TESTS / "fuzzing" / "run.py"


@pytest.mark.slow
def test_mutants_of_every_kind_are_refused_or_valid():
    """Another seed than that of `make fuzz`; the same in every run."""
    output = run_program(RUN, "--count", 4000, "--seed", "short", "--processes", 1, timeout=600)
    lines = output.splitlines()[1:]
    assert [line.split("  ")[0] for line in map(str.strip, lines)] == [*SHARES, "all"]


@dataclass
class Broken(Kind):
    """A document whose reader does what a test passes."""

    read: Callable[[], str] = str

    def use(self, mutant: Mutant, random: Random) -> str:
        return self.read()

    def original_digest(self, mutant: Mutant) -> str:
        return "original"


def fail(error: Exception) -> Callable[[], str]:
    def read() -> str:
        raise error

    return read


def run_broken(folder, read, *, is_sealed=True):
    kind = Broken(folder, read=read)
    limit = address_space() + MEMORY
    return run_limited(kind, Mutant({}, is_sealed), "seed", limit)[0]


def test_a_mutant_that_reads_wrong_or_too_much_is_found(tmp_path):
    assert run_broken(tmp_path, fail(KeyError("x"))) == "error"
    assert run_broken(tmp_path, fail(FormatError("no name"))) == "unnamed"
    assert run_broken(tmp_path, fail(FormatError(f"{tmp_path}: invalid"))) == "refused"
    assert run_broken(tmp_path, fail(AssertionError())) == "wrong"
    assert run_broken(tmp_path, lambda: "other", is_sealed=False) == "wrong"
    assert run_broken(tmp_path, lambda: "original", is_sealed=False) == "loaded"
    assert run_broken(tmp_path, lambda: str(torch.zeros(2 * MEMORY, dtype=torch.int8))) == "memory"
