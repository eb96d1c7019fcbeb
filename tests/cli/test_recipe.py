"""`compress --recipe` on a tiny model folder."""

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from pathlib import Path

import jsonschema
import pytest
import torch
from safetensors.torch import save_file
from tiny_models import llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import slimtensors
from slimtensors.cli import main
from slimtensors.recipe import Recipe
from slimtensors.report import collect

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "recipe-report.json"
RECIPE = """
first_stage:
  sparsity_modifiers:
    SparseGPTModifier: {sparsity: 0.75, targets: ["re:.*mlp"]}
"""


def run(*arguments):
    return main([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "llama"
    llama().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(90)} | {"?": 90}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(folder)
    (folder.parent / "text.txt").write_text(" ".join(f"w{i * i % 90}" for i in range(2000)))
    (folder.parent / "recipe.yaml").write_text(RECIPE)
    return folder


def test_a_recipe_is_applied_and_reported(source, tmp_path, capsys):
    recipe, text = source.parent / "recipe.yaml", source.parent / "text.txt"
    command = [
        "compress",
        source,
        "--recipe",
        recipe,
        "--calibration",
        text,
        "-o",
        tmp_path / "out",
    ]
    assert run(*command, "--work", tmp_path / "work") == 0
    out = capsys.readouterr().out
    assert out.startswith("SparseGPT: 6 layers in ")
    assert "6 changed layers" in out
    assert "75.0% zeros" in out
    assert len(out.splitlines()) <= 10
    assert "stored as bitmask" in out
    weights = slimtensors.load(tmp_path / "out")
    assert weights["model.layers.0.mlp.up_proj.weight"].eq(0).float().mean() == 0.75
    assert Recipe.load(tmp_path / "out" / "recipe.yaml") == Recipe.load(recipe)
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"out", "work"}
    assert run(*command) == 2
    assert "already exists" in capsys.readouterr().err
    assert run(*command, "-f", "--json") == 0
    data = json.loads(capsys.readouterr().out)
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(data, schema, jsonschema.Draft202012Validator)
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == data
    assert collect(tmp_path / "out").recipe == data
    for source_path in (tmp_path / "out", tmp_path / "out" / "report.json"):
        assert run("inspect", source_path, "--html", tmp_path / "page.html", "-f") == 0
        assert '"modifier":"SparseGPT"' in (tmp_path / "page.html").read_text()
    capsys.readouterr()
    assert run(*command, "-f", "-q") == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--quantize", "W4A16"], "--quantize cannot be combined with --recipe"),
        (["--preset", "sparse"], "--preset cannot be combined"),
        (["--only", "*"], "cannot be combined with --dry-run, --only or --skip"),
        ([], "SparseGPT requires calibration data: --calibration FILE"),
        (["--calibration", "nowhere.txt"], "file not found"),
    ],
)
def test_options_that_exclude_a_recipe_are_refused(source, tmp_path, capsys, more, words):
    recipe = ["--recipe", source.parent / "recipe.yaml"]
    assert run("compress", source, *recipe, *more, "-o", tmp_path / "out") == 2
    assert words.replace("Modifier", "") in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_errors_name_the_recipe_or_source(source, tmp_path, capsys):
    assert run("compress", source, "--recipe", tmp_path / "no.yaml", "-o", tmp_path / "out") == 2
    assert f"{tmp_path / 'no.yaml'}: recipe not found" in capsys.readouterr().err
    assert run("compress", source, "--recipe", source, "-o", tmp_path / "out") == 2
    assert f"{source}: cannot read the recipe: Is a directory" in capsys.readouterr().err
    bad = tmp_path / "bad.yaml"
    bad.write_bytes(b"\xff\xfe")
    assert run("compress", source, "--recipe", bad, "-o", tmp_path / "out") == 2
    assert f"{bad}: invalid YAML: not UTF-8 text" in capsys.readouterr().err
    bad.write_text("test_modifiers: {SparseGTP: {}}")
    assert run("compress", source, "--recipe", bad, "-o", tmp_path / "out") == 2
    assert "bad.yaml: unknown modifier 'SparseGTP'; did you mean" in capsys.readouterr().err
    save_file({"x": torch.zeros(4)}, tmp_path / "x.safetensors")
    recipe = source.parent / "recipe.yaml"
    assert run("compress", tmp_path / "x.safetensors", "--recipe", recipe, "-o", "out") == 2
    assert "--recipe requires a model folder" in capsys.readouterr().err
    assert run("compress", source, "--work", "here", "-o", "out") == 2
    assert "--work requires --quantize, --recipe or a budget" in capsys.readouterr().err
    assert run("compress", source, "--recipe", recipe) == 2
    assert "requires -o" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [["--recipe", "recipe.yaml"], ["--quantize", "W4A16", "--method", "gptq"]]
)
def test_one_progress_bar_is_shown_on_a_terminal(source, tmp_path, options):
    words = ["compress", source.name, *options, "--calibration", "text.txt", "-o", tmp_path / "out"]
    command = [sys.executable, "-m", "slimtensors", *map(str, words)]
    terminal, side = pty.openpty()
    fcntl.ioctl(side, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = subprocess.Popen(
        command, cwd=source.parent, stdout=subprocess.PIPE, stderr=side, text=True
    )
    os.close(side)
    shown = b""
    while chunk := _read_terminal(terminal):
        shown += chunk
    out, _ = process.communicate()
    os.close(terminal)
    assert process.returncode == 0, shown
    label = "SparseGPT" if "--recipe" in options else "gptq"
    total = 6 if "--recipe" in options else 14
    frames = [frame for frame in shown.decode().split("\r") if "%|" in frame]
    assert all(frame.lstrip().startswith(f"{label}: ") for frame in frames), shown
    assert f"/{total} layers [" in frames[-1]
    assert not shown.decode().split("\r")[-1].strip(), "the bar is removed at the end"
    assert "%|" not in out


def _read_terminal(terminal):
    try:
        return os.read(terminal, 4096)
    except OSError:  # the process has closed its side
        return b""
