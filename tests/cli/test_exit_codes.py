import pytest
import torch
from models import pruned, weights, write_folder
from safetensors.torch import save_file

import slimtensors
from slimtensors.cli import main


def run(*arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as usage:
        return usage.code


def error_line(capsys, out=""):
    """Return stderr after checking that it is one line, and that stdout is `out`."""
    captured = capsys.readouterr()
    assert captured.out == out
    assert captured.err.startswith("slimtensors: ")
    assert captured.err.count("\n") == 1
    return captured.err.rstrip()


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "x.safetensors"
    slimtensors.save(weights(), path)
    return path


def test_exit_code_0_on_success(saved, tmp_path):
    assert run("verify", saved) == 0


def test_exit_code_1_if_verify_finds_differences(saved, tmp_path, capsys):
    other = weights() | {"model.layers.1.mlp.weight": pruned(64, 64, seed=77)}
    save_file(other, tmp_path / "other")
    assert run("verify", saved, "--against", tmp_path / "other") == 1
    captured = capsys.readouterr()
    assert captured.out == f"different from {tmp_path / 'other'}: 6 of 7 tensors are equal\n"
    assert captured.err.startswith("slimtensors: model.layers.1.mlp.weight: ")
    save_file({"x": torch.ones(2)}, tmp_path / "few")
    assert run("verify", saved, "--against", tmp_path / "few") == 1
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 8
    assert captured.out == f"different from {tmp_path / 'few'}: 0 of 8 tensors are equal\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--preset", "spars"], "unknown preset 'spars'; did you mean 'sparse'?"),
        (["--dialect", "slimm"], "unknown dialect 'slimm'; did you mean 'slim'?"),
        (["--max-shard-size", "5XB"], "invalid size '5XB'"),
        (["-T", "0"], "threads must be at least 1, got 0"),
    ],
)
def test_exit_code_2_for_an_invalid_option(saved, tmp_path, capsys, options, words):
    assert run("compress", saved, "-o", tmp_path / "y", *options) == 2
    assert words in error_line(capsys)
    assert run("compress", write_folder(tmp_path / "m"), "-o", tmp_path / "z", *options) == 2
    assert words in error_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "x.safetensors"]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["compres"],
        ["compress"],
        ["inspect", "x", "--jsno"],
        ["verify", "x", "-T", "many"],
        ["codecs", "extra"],
    ],
)
def test_exit_code_2_for_invalid_usage(arguments, capsys):
    assert run(*arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("usage: slimtensors")


def test_exit_code_2_without_a_target_unless_dry_run(tmp_path, capsys):
    assert run("compress", write_folder(tmp_path / "m")) == 2
    assert "-o" in error_line(capsys)
    assert run("compress", tmp_path / "m", "--dry-run") == 0


@pytest.mark.parametrize("verb", ["inspect", "verify", "compress", "decompress"])
def test_exit_code_2_for_a_missing_source(tmp_path, capsys, verb):
    target = ["-o", tmp_path / "y"] if verb.endswith("compress") else []
    assert run(verb, tmp_path / "nothing", *target) == 2
    assert "nothing: no such file or folder" in error_line(capsys)


def test_exit_code_2_for_an_impossible_target(saved, tmp_path, capsys):
    assert run("compress", saved, "-o", tmp_path / "no" / "such" / "y") == 2
    assert "does not exist" in error_line(capsys)
    assert run("compress", saved, "-o", saved / "y") == 2
    assert error_line(capsys)
    assert run("verify", saved, "--against", tmp_path / "nothing") == 2
    assert "nothing" in error_line(capsys)


def test_exit_code_2_for_a_dtype_that_the_dialect_cannot_store(tmp_path, capsys):
    slimtensors.save({"odd": torch.eye(9, dtype=torch.complex128)}, tmp_path / "x")
    options = ("--dialect", "compressed-tensors")
    assert run("compress", tmp_path / "x", "-o", tmp_path / "y", *options) == 2
    assert "odd: safetensors does not support complex128" in error_line(capsys)


@pytest.mark.parametrize("verb", ["inspect", "verify", "compress", "decompress"])
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"1234567",
        b"\x10\0\0\0\0\0\0\0{",
        b"\x02\0\0\0\0\0\0\0[]",
        b"\x02\0\0\0\0\0\0\0\xff\xff",
        b"hello, this is some text",
    ],
)
def test_exit_code_3_for_a_file_that_is_not_safetensors(tmp_path, capsys, verb, raw):
    path = tmp_path / "x"
    path.write_bytes(raw)
    target = ["-o", tmp_path / "y"] if verb.endswith("compress") else []
    assert run(verb, path, *target) == 3
    assert f"{path}: " in error_line(capsys)
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("verb", ["verify", "compress", "decompress"])
def test_exit_code_3_for_a_damaged_file(saved, tmp_path, capsys, verb):
    raw = bytearray(saved.read_bytes())
    raw[-1000] ^= 1
    saved.write_bytes(raw)
    target = ["-o", tmp_path / "y"] if verb.endswith("compress") else []
    assert run(verb, saved, *target) == 3
    line = error_line(capsys, "damaged: 1 of 7 tensors\n" if verb == "verify" else "")
    assert f"{saved}: model." in line
    assert "damaged" in line
    assert [p.name for p in tmp_path.iterdir()] == [saved.name]


def test_exit_code_3_for_a_truncated_file(saved, capsys):
    raw = saved.read_bytes()
    saved.write_bytes(raw[:-1])
    assert run("inspect", saved) == 3
    assert "truncated" in error_line(capsys)


def test_exit_code_3_for_a_damaged_shard_and_no_leftovers(tmp_path, capsys):
    source = write_folder(tmp_path / "model", shards=2)
    run("compress", source, "-o", tmp_path / "small", "-q")
    shard = tmp_path / "small" / "model-00002-of-00002.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-700] ^= 1
    shard.write_bytes(raw)
    assert run("decompress", tmp_path / "small", "-o", tmp_path / "back") == 3
    assert "model-00002-of-00002.safetensors" in error_line(capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "small"]


@pytest.mark.parametrize("legacy", [False, True])
def test_exit_code_3_for_a_torch_save_file(tmp_path, capsys, legacy):
    path = tmp_path / "model.pt"
    torch.save({"x": torch.ones(3)}, path, _use_new_zipfile_serialization=not legacy)
    assert run("compress", path, "-o", tmp_path / "y") == 3
    line = error_line(capsys)
    assert "torch.save" in line or legacy
    assert "model.pt" in line


def test_exit_code_3_for_a_folder_of_pickles(tmp_path, capsys):
    (tmp_path / "model").mkdir()
    torch.save({"x": torch.ones(3)}, tmp_path / "model" / "pytorch_model.bin")
    assert run("compress", tmp_path / "model", "-o", tmp_path / "y") == 3
    assert "contains PyTorch weights (pytorch_model.bin)" in error_line(capsys)
