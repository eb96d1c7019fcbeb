"""Inspection and verification of distributed checkpoints."""

import shutil

import pytest
import torch
from checkpoint.distributed.one import SINGLE, later, save, state

import slimtensors
from slimtensors.checkpoint.distributed import inspect, verify
from slimtensors.cli import main
from slimtensors.errors import CorruptFileError, FormatError, MismatchError
from slimtensors.folder.compress import compress_folder

pytestmark = pytest.mark.filterwarnings(SINGLE)


@pytest.fixture
def runs(tmp_path):
    """Return a folder with a checkpoint and a delta of it."""
    save({**state(), "keys": (torch.ones(3),)}, tmp_path / "a")
    save(later(state()), tmp_path / "b", base=tmp_path / "a")
    return tmp_path


def flip(path):
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 5] ^= 4  # in the weight
    path.write_bytes(raw)


def test_inspect_lists_each_tensor_of_the_state(runs, capsys):
    found = inspect(runs / "a")
    wide = next(t for t in found.tensors if t.name == "model.wide")
    assert (wide.shape, wide.codec, wide.dense_bytes) == ((1500, 700), "huffman", 1500 * 700 * 4)
    assert 0.7 < wide.stored_bytes / wide.dense_bytes < 0.9
    assert main(["inspect", str(runs / "b"), "--only", "model.*"]) == 0
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()[1:]] == [
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


def test_verify_raises_if_a_file_or_base_is_missing(runs):
    shutil.rmtree(runs / "a")
    with pytest.raises(MismatchError, match="not found at"):
        verify(runs / "b")
    save(state(), runs / "c")
    (runs / "c" / "rank-00000.safetensors").unlink()
    with pytest.raises(CorruptFileError, match="not found; the checkpoint is incomplete"):
        verify(runs / "c")


def test_a_distributed_checkpoint_does_not_load_as_a_model(runs):
    with pytest.raises(FormatError, match="is a distributed checkpoint"):
        slimtensors.load(runs / "a")
    with pytest.raises(FormatError, match="is a distributed checkpoint"):
        compress_folder(runs / "a", runs / "c")
