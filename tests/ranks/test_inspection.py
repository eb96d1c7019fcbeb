"""What the command line, and those who take it for a model, say of a distributed checkpoint."""

import shutil

import pytest
import torch
from ranks.one import SINGLE, later, save, state

import slimtensors
from slimtensors.checkpoint.distributed import inspect, verify
from slimtensors.cli import main
from slimtensors.errors import CorruptFileError, FormatError, MismatchError
from slimtensors.folder.compress import compress_folder

pytestmark = pytest.mark.filterwarnings(SINGLE)


@pytest.fixture
def runs(tmp_path):
    """A checkpoint, and a difference from it."""
    save({**state(), "keys": (torch.ones(3),)}, tmp_path / "a")
    save(later(state()), tmp_path / "b", base=tmp_path / "a")
    return tmp_path


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 5] ^= 4  # of the weight
    path.write_bytes(raw)


def test_a_table_has_a_line_for_each_tensor_of_the_state(runs, capsys):
    found = inspect(runs / "a")
    wide = next(t for t in found.tensors if t.name == "model.wide")
    assert (wide.shape, wide.codec, wide.dense_bytes) == ((1500, 700), "huffman", 1500 * 700 * 4)
    assert 0.7 < wide.stored_bytes / wide.dense_bytes < 0.9
    assert main(["inspect", str(runs / "b"), "--only", "model.*"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.splitlines()[1:]] == [
        *["model.wide", "model.bias", "model.scale"],
        "total",
    ]


def test_verify_reads_all_ranks_and_the_base(runs, capsys):
    assert verify(runs / "a")
    assert main(["verify", str(runs / "b")]) == 0
    assert capsys.readouterr().out == "6 tensors intact\n"
    flip(runs / "a" / "rank-00000.safetensors")
    assert main(["verify", str(runs / "b")]) == 3
    assert "rank-00000.safetensors" in capsys.readouterr().err
    assert list(verify(runs / "a").damaged) == ["model.wide"]


def test_verify_misses_files_and_bases(runs):
    shutil.rmtree(runs / "a")
    with pytest.raises(MismatchError, match="bring it back"):
        verify(runs / "b")
    save(state(), runs / "c")
    (runs / "c" / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptFileError, match="is missing"):
        verify(runs / "c")


def test_a_checkpoint_is_not_taken_for_a_model(runs):
    with pytest.raises(FormatError, match="is a distributed checkpoint"):
        slimtensors.load(runs / "a")
    with pytest.raises(FormatError, match="is a distributed checkpoint"):
        compress_folder(runs / "a", runs / "c")
