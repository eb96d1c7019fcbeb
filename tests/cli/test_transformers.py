"""Stock transformers refuses our folders instead of running on random weights."""

import subprocess
import sys
from pathlib import Path

import pytest
from models import write_llama
from strategies import same_bits

import slimtensors
from slimtensors.cli import main

PROGRAM = Path(__file__).parent / "programs" / "load_with_transformers.py"


def load_with_transformers(folder):
    command = [sys.executable, str(PROGRAM), str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dialect", "tied", "shard"),
    [("slim", False, "60kB"), ("slim", True, None), ("compressed-tensors", False, None)],
)
def test_stock_transformers_refuses_a_compressed_folder(tmp_path, dialect, tied, shard):
    source = write_llama(tmp_path / "model", tied=tied, shard=shard)
    small = str(tmp_path / "small")
    assert main(["compress", str(source), "-o", small, "--dialect", dialect, "-q"]) == 0
    assert "bitmask" in {t.codec.partition("(")[0] for t in slimtensors.inspect(small).tensors}
    refused = load_with_transformers(small)
    if dialect == "compressed-tensors" and refused.returncode == 0:
        # transformers 5.23 ignores formats that compressed-tensors has dropped, and reports that.
        assert "newly initialized because missing" in refused.stderr
        return
    assert refused.returncode != 0
    assert "LOADED" not in refused.stdout
    if dialect == "slim":
        assert "size" in refused.stderr or "shape" in refused.stderr, refused.stderr


@pytest.mark.slow
def test_stock_transformers_refuses_a_delta_even_if_nothing_changed(tmp_path):
    source, delta = str(write_llama(tmp_path / "model")), str(tmp_path / "delta")
    assert main(["diff", source, "--base", source, "-o", delta, "-q"]) == 0
    refused = load_with_transformers(delta)
    assert refused.returncode != 0
    assert "LOADED" not in refused.stdout


@pytest.mark.slow
def test_stock_transformers_loads_a_decompressed_folder(tmp_path):
    small, back = str(tmp_path / "small"), str(tmp_path / "back")
    source = write_llama(tmp_path / "model", shard="60kB")
    assert main(["compress", str(source), "-o", small, "-q"]) == 0
    assert main(["decompress", small, "-o", back, "-q"]) == 0
    loaded = load_with_transformers(back)
    assert (loaded.returncode, loaded.stdout.strip()) == (0, "LOADED"), loaded.stderr


def test_transformers_loads_the_same_weights_after_a_round_trip(tmp_path):
    from transformers import AutoModelForCausalLM

    source = write_llama(tmp_path / "model", tied=True)
    for dialect in ("slim", "compressed-tensors"):
        small, back = str(tmp_path / dialect), str(tmp_path / f"{dialect}-back")
        assert main(["compress", str(source), "-o", small, "--dialect", dialect, "-q"]) == 0
        assert main(["decompress", small, "-o", back, "-q"]) == 0
        want = AutoModelForCausalLM.from_pretrained(source).state_dict()
        have = AutoModelForCausalLM.from_pretrained(back).state_dict()
        assert have.keys() == want.keys()
        assert all(same_bits(have[name], x) for name, x in want.items())
