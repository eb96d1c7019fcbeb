"""`compress` with a budget."""

import json

import pytest
import torch
from tiny_models import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from slimtensors.cli import main


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    llama().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)} | {"?": 90}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    (folder.parent / "text.txt").write_text(" ".join(f"w{i * i % 90}" for i in range(3000)))
    return folder


def weight_bytes(folder):
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def test_a_folder_is_fitted_to_a_size(source, tmp_path, capsys):
    size = weight_bytes(source) // 4
    command = [
        "compress",
        source,
        "--target-size",
        size,
        "--calibration",
        source.parent / "text.txt",
    ]
    assert run(*command, "-o", tmp_path / "small", "--work", tmp_path / "work") == 0
    out = capsys.readouterr().out
    assert "bits per parameter" in out
    assert "held-out predictions" in out
    assert 0.99 * size < weight_bytes(tmp_path / "small") <= size
    assert (tmp_path / "small" / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "small")
    assert bool(model(torch.tensor([[1, 2, 3]])).logits.isfinite().all())
    assert run("verify", tmp_path / "small") == 0
    assert run(*command, "-o", tmp_path / "small") == 2
    assert "already exists" in capsys.readouterr().err
    assert run(*command, "-o", tmp_path / "small", "-f", "--work", tmp_path / "work", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    assert data["weight_bytes"] == weight_bytes(tmp_path / "small")
    assert data["budget"] == {"size": str(size)}


def test_bits_and_divergence_are_budgets_too(source, tmp_path, capsys):
    text = source.parent / "text.txt"
    options = ["compress", source, "--calibration", text, "--json"]
    assert run(*options, "--target-bits", 6, "-o", tmp_path / "bits", "--ignore", "lm_head") == 0
    data = json.loads(capsys.readouterr().out)
    assert 5.9 < data["bits_per_parameter"] <= 6
    assert "lm_head.weight" not in {x["name"] for x in data["tensors"]}
    assert run(*options, "--max-kl", 0.001, "-o", tmp_path / "kl") == 0
    assert json.loads(capsys.readouterr().out)["measured"]["kl"] <= 0.001


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target-size", "1MB", "--quantize", "W4A16"], "--quantize cannot be combined"),
        (["--target-size", "1MB", "--preset", "extreme"], "--preset cannot be combined"),
        (["--target-size", "1MB", "--dry-run"], "takes --ignore, not --dry-run"),
        (["--target-size", "many"], "many"),
        (["--target-bits", "-1"], "positive number"),
        (["--max-kl", "0"], "positive number"),
        (["--heal", "3"], "--heal requires a budget"),
        (["--target-size", "1MB", "--heal", "0"], "positive number of minutes"),
        (["--target-size", "1kB"], "too small"),
        (["--target-size", "30kB", "--ignore", "nothing"], "matches no layer"),
        (["--target-size", "30kB", "--calibration", "missing.txt"], "missing.txt"),
        (["--target-size", "1MB", "--target-bits", "3"], "not allowed with"),
    ],
)
def test_options_that_make_no_sense_are_refused(source, tmp_path, capsys, options, message):
    try:
        code = run("compress", source, *options, "-o", tmp_path / "out")
    except SystemExit as stop:
        code = stop.code
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_cannot_be_fitted(source, tmp_path, capsys):
    file = source / "model.safetensors"
    assert run("compress", file, "--target-size", "1MB", "-o", tmp_path / "out.safetensors") == 2
    assert "requires a model folder" in capsys.readouterr().err
