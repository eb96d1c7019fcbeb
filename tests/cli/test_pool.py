"""`slimtensors pool`."""

import json
from pathlib import Path

import jsonschema
import pytest
from models import weights, write_folder

from slimtensors.cli import main

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "pool.json").read_text())


@pytest.fixture
def models(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    table = weights()
    write_folder(tmp_path / "base", table=table)
    name = "model.layers.0.mlp.weight"
    write_folder(tmp_path / "tuned", table={**table, name: table[name] * 2})
    return tmp_path


def run_json(capsys, *words):
    code = main(["pool", *words, "--json"])
    result = json.loads(capsys.readouterr().out)
    jsonschema.validate(result, SCHEMA)
    return code, result


def test_add_list_get_remove_verify(models, capsys):
    assert main(["pool", "add", "pool", "base", "tuned"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("base: ")
    assert first.endswith(", 5 of 7 tensors new"), "three norms are equal"
    assert "1 of 7 tensors new, differences from base" in second
    assert main(["pool", "list", "pool"]) == 0
    head, *rows, total = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "base", "size", "needed", "by", "it", "alone"]
    assert [row.split()[:2] for row in rows] == [["base", "-"], ["tuned", "base"]]
    assert total.startswith("2 models: ")
    assert main(["pool", "get", "pool", "tuned", "-o", "again"]) == 0
    assert Path("again/model.safetensors").read_bytes() == (
        Path("tuned/model.safetensors").read_bytes()
    )
    assert main(["pool", "verify", "pool"]) == 0
    assert capsys.readouterr().out.endswith(": all intact\n")
    assert main(["pool", "remove", "pool", "base"]) == 0
    assert capsys.readouterr().out.startswith("1 model removed, ")
    assert main(["pool", "clean", "pool"]) == 0
    assert capsys.readouterr().out == "0 B freed\n"


def test_json_of_every_action(models, capsys):
    _, added = run_json(capsys, "add", "pool", "base", "tuned")
    assert [row["base"] for row in added["added"]] == [None, "base"]
    _, listed = run_json(capsys, "list", "pool")
    assert listed["stored_bytes"] < listed["bytes"]
    assert run_json(capsys, "get", "pool", "base", "-o", "again")[1]["name"] == "base"
    assert run_json(capsys, "verify", "pool")[1]["damaged"] == []
    assert run_json(capsys, "clean", "pool")[1] == {"removed": [], "freed_bytes": 0}
    assert run_json(capsys, "remove", "pool", "tuned")[1]["freed_bytes"] > 0


def test_exit_codes(models, capsys):
    assert main(["pool", "list", "missing"]) == 2
    assert main(["pool", "add", "pool", "base", "tuned", "--name", "x"]) == 2
    assert main(["pool", "add", "pool", "missing"]) == 2
    assert main(["pool", "add", "pool", "base"]) == 0
    assert main(["pool", "get", "pool", "bass", "-o", "again"]) == 2
    assert main(["pool", "get", "pool", "base", "-o", "tuned"]) == 2
    path = max(Path("pool/tensors").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-1])
    assert main(["pool", "verify", "pool"]) == 3
    err = capsys.readouterr().err
    assert str(path) in err
    assert "did you mean 'base'?" in err
    assert "tuned already exists; use -f to replace it" in err
