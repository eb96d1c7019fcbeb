"""Sources that are no models get one sentence that says what they are and what helps."""

import shutil

import pytest
import torch
from models import weights, write_folder
from safetensors.torch import save_file

import slimtensors
from slimtensors.checkpoint import build_checkpoint, save_checkpoint
from slimtensors.cli import main


def run(*arguments):
    try:
        return main([str(argument) for argument in arguments])
    except SystemExit as usage:
        return usage.code


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """One source of each kind."""
    place = tmp_path_factory.mktemp("sources")
    save_file(weights(), place / "good.safetensors")
    torch.save(weights(), place / "model.pt")
    torch.save(weights(), place / "old.pt", _use_new_zipfile_serialization=False)
    (place / "model.gguf").write_bytes(b"GGUF\3\0\0\0" + bytes(100))
    (place / "notes.txt").write_text("hello, this is some text")
    (place / "pointer.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    (place / "page.safetensors").write_text("<!DOCTYPE html><html></html>")
    for name in ("bin", "bin-shards", "lora", "empty", "no-weights", "gguf"):
        (place / name).mkdir()
    torch.save(weights(), place / "bin" / "pytorch_model.bin")
    torch.save(weights(), place / "bin-shards" / "pytorch_model-00001-of-00002.bin")
    (place / "gguf" / "q4.gguf").write_bytes(b"GGUF")
    (place / "no-weights" / "config.json").write_text("{}")
    save_file(weights(), place / "lora" / "adapter_model.safetensors")
    (place / "lora" / "adapter_config.json").write_text("{}")
    write_folder(place / "pipeline" / "unet")
    (place / "pipeline" / "model_index.json").write_text("{}")
    write_folder(place / "outer" / "inner")
    model = torch.nn.Linear(4, 4)
    state = build_checkpoint(model, torch.optim.SGD(model.parameters()), step=1)
    save_checkpoint(state, place / "run" / "step-1")
    return place


KINDS = {
    "model.pt": ["torch.save file", "torch.load('model.pt', weights_only=True)"],
    "old.pt": ["torch.save file", "torch.load('old.pt', weights_only=True)"],
    "model.gguf": ["GGUF", "save_pretrained"],
    "notes.txt": ["not a safetensors file (text)"],
    "pointer.safetensors": ["git lfs pull"],
    "page.safetensors": ["download it again"],
    "bin": ["torch.load('bin/pytorch_model.bin', weights_only=True), 'bin/model.safetensors'"],
    "bin-shards": ["load the model with transformers and call save_pretrained"],
    "gguf": ["q4.gguf"],
    "lora": ["LoRA adapter", "lora/adapter_model.safetensors"],
    "empty": ["contains no files"],
    "no-weights/config.json": ["not an index of shards ('weight_map' not found)"],
    "no-weights": ["no safetensors files found; the folder contains config.json"],
    "pipeline": ["slimtensors compress pipeline/unet -o OUT/unet"],
    "outer": ["inner"],
    "run": ["run with checkpoints", "load_checkpoint"],
    "run/step-1": ["is a checkpoint, not a model"],
    "owner/name": ["hf download owner/name --local-dir name"],
    "nothing.safetensors": ["nothing.safetensors: no such file or folder\n"],
}
VERBS = [
    ["compress", "{}", "-o", "out"],
    ["decompress", "{}", "-o", "out"],
    ["convert", "{}", "--to", "slim", "-o", "out"],
    ["diff", "{}", "--base", "good.safetensors", "-o", "out"],
    ["diff", "good.safetensors", "--base", "{}", "-o", "out"],
    ["restore", "{}", "--base", "good.safetensors", "-o", "out"],
    ["verify", "good.safetensors", "--against", "{}"],
    ["bench", "{}"],
    ["inspect", "{}"],
    ["verify", "{}"],
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_verb_explains_the_source(sources, monkeypatch, capsys, kind):
    monkeypatch.chdir(sources)
    for words in VERBS:
        if kind.startswith("run") and words[0] in ("inspect", "verify"):
            continue  # these verbs accept checkpoints
        assert run(*(word.format(kind) for word in words)) in (2, 3), words
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith("slimtensors: ")
        assert captured.err.count("\n") == 1
        assert "Errno" not in captured.err
        assert all(text in captured.err for text in KINDS[kind])
        assert not (sources / "out").exists()


def test_a_missing_source_is_explained_before_options(sources, monkeypatch, capsys):
    monkeypatch.chdir(sources)
    for options in (["--quantize", "W4A16"], ["--recipe", "recipe.yaml"]):
        assert run("compress", "owner/name", *options, "-o", "out") == 2
        assert "hf download owner/name" in capsys.readouterr().err


def test_the_command_for_pickles_works(sources, tmp_path, monkeypatch):
    shutil.copytree(sources / "bin", tmp_path / "bin")
    monkeypatch.chdir(tmp_path)
    tensors = torch.load("bin/pytorch_model.bin", weights_only=True)
    slimtensors.save(tensors, "bin/model.safetensors", preset="dense")
    assert run("compress", "bin", "-o", "small", "-q") == 0


def test_errors_of_the_system_have_no_number(sources, tmp_path, capsys):
    good = sources / "good.safetensors"
    assert run("compress", good, "-o", good / "y") == 2
    assert "Errno" not in capsys.readouterr().err
    long = tmp_path / ("x" * 300)
    assert run("compress", good, "-o", long) == 2
    assert f"{long}: file name too long" in capsys.readouterr().err
