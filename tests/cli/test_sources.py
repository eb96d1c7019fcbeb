"""Sources are never overwritten, whatever they are called."""

import os
import shutil

import pytest
import torch
from models import weights, write_folder
from safetensors.torch import save_file

import slimtensors
from slimtensors.cli import main
from slimtensors.errors import ConfigError
from slimtensors.folder import (
    FolderOptions,
    compress_folder,
    convert_folder,
    decompress_folder,
    diff_folder,
    quantize_folder,
    restore_folder,
)
from slimtensors.quantization import QuantizationConfig


def run(*arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as usage:
        return usage.code


def read_files(folder):
    found = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A model folder, a delta of it, and other names of both; the current folder is `place`."""
    write_folder(tmp_path / "model")
    changed = {name: x + 1 for name, x in weights().items()}
    write_folder(tmp_path / "tuned", table=changed)
    diff_folder(tmp_path / "tuned", tmp_path / "model", tmp_path / "delta")
    (tmp_path / "link").symlink_to("model")
    (tmp_path / "linked.safetensors").symlink_to("model/model.safetensors")
    os.link(tmp_path / "model" / "model.safetensors", tmp_path / "hard.safetensors")
    monkeypatch.chdir(tmp_path)
    return tmp_path


FOLDER_VERBS = [
    ["compress", "model"],
    ["compress", "model/model.safetensors", "--max-shard-size", "1GB"],
    ["compress", "model", "--quantize", "W4A16"],
    ["compress", "model", "--recipe", "recipe.yaml"],
    ["decompress", "model"],
    ["convert", "model", "--to", "slim"],
    ["diff", "model", "--base", "tuned"],
    ["diff", "tuned", "--base", "model"],
    ["restore", "delta", "--base", "model"],
    ["inspect", "model", "--html"],
    ["demo", "--model", "model"],
]
FOLDERS = ["model", "./model/", "link", "../{}/model", "model/inner", "model/a/b", "."]


@pytest.mark.parametrize("words", FOLDER_VERBS, ids=" ".join)
@pytest.mark.parametrize("target", FOLDERS)
def test_a_verb_does_not_write_over_its_source_folder(place, capsys, words, target):
    if "model.safetensors" in words[1] and "/model/" in f"/{target}":
        pytest.skip("the source is one file; other files beside it may be written")
    before = read_files(place)
    target = target.format(place.name)
    option = [] if words[-1] == "--html" else ["-o"]
    assert run(*words, *option, target, "-f") == 2
    message = capsys.readouterr().err
    assert "the source" in message
    assert run(*words, *option, target) == 2
    assert capsys.readouterr().err == message  # and not: use -f
    assert read_files(place) == before


FILE_VERBS = [
    ["compress", "model/model.safetensors"],
    ["decompress", "model/model.safetensors"],
    ["diff", "model/model.safetensors", "--base", "tuned/model.safetensors"],
    ["diff", "tuned/model.safetensors", "--base", "model/model.safetensors"],
    ["restore", "delta/delta.safetensors", "--base", "model/model.safetensors"],
    ["inspect", "model/model.safetensors", "--html"],
]
FILES = ["model/model.safetensors", "linked.safetensors", "hard.safetensors", "link", "model"]


@pytest.mark.parametrize("words", FILE_VERBS, ids=" ".join)
@pytest.mark.parametrize("target", FILES)
def test_a_verb_does_not_write_over_its_source_file(place, capsys, words, target):
    before = read_files(place)
    option = [] if words[-1] == "--html" else ["-o"]
    assert run(*words, *option, target, "-f") == 2
    assert "the source" in capsys.readouterr().err
    assert read_files(place) == before


def test_a_file_may_be_written_beside_its_source(place):
    assert run("compress", "model/model.safetensors", "-o", "model/small.safetensors", "-q") == 0
    assert run("decompress", "model/small.safetensors", "-o", "model/back.safetensors", "-q") == 0
    files = read_files(place)
    assert files["model/back.safetensors"] == files["model/model.safetensors"]


CONFIG = QuantizationConfig.preset("FP8_DYNAMIC")
REPLACE = FolderOptions(replace=True)
CALLS = {
    "compress_folder": lambda to: compress_folder("model", to, replace=True),
    "decompress_folder": lambda to: decompress_folder("model", to, replace=True),
    "convert_folder": lambda to: convert_folder("model", to, to="slim", how=REPLACE),
    "quantize_folder": lambda to: quantize_folder("model", to, CONFIG, how=REPLACE),
    "diff_folder": lambda to: diff_folder("model", "tuned", to, replace=True),
    "base of diff_folder": lambda to: diff_folder("tuned", "model", to, replace=True),
    "restore_folder": lambda to: restore_folder("delta", "model", to, replace=True),
    "save": lambda to: slimtensors.save(slimtensors.open("model"), to),
    "decompress": lambda to: slimtensors.decompress("model", to),
    "diff": lambda to: slimtensors.diff("model", "tuned", to),
    "restore": lambda to: slimtensors.restore("delta", "model", to),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
@pytest.mark.parametrize("target", ["model", "link", "model/inner", "."])
def test_a_function_does_not_write_over_its_source(place, call, target):
    before = read_files(place)
    with pytest.raises(ConfigError, match=r"the source .*; choose another target"):
        call(target)
    assert read_files(place) == before


def test_a_shard_that_is_a_link_is_not_overwritten(tmp_path):
    (tmp_path / "store").mkdir()
    save_file({"x": torch.eye(64)}, tmp_path / "store" / "blob")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "model.safetensors").symlink_to("../store/blob")
    before = (tmp_path / "store" / "blob").read_bytes()
    for target in (tmp_path / "store" / "blob", tmp_path / "store"):
        with pytest.raises(ConfigError, match=r"the source .*; choose another target"):
            slimtensors.save(slimtensors.open(tmp_path / "model"), target)
    assert (tmp_path / "store" / "blob").read_bytes() == before


def test_a_copy_of_the_source_may_be_replaced(place):
    shutil.copytree("model", "copy")
    assert run("compress", "model", "-f", "-o", "copy", "-q") == 0
    assert slimtensors.verify("copy", against="model").files == "identical"
