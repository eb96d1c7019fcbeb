"""`slimtensors sync` publishes model folders, follows into files and folders, lists versions."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from strategies import same_bits

import slimtensors
from slimtensors.cli import main

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def run(capsys, *words):
    """Run a command, check its JSON, and return it."""
    assert main(["sync", *map(str, words), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    schema = json.loads((SCHEMAS / f"sync-{words[0]}.json").read_text())
    jsonschema.validate(found, schema, jsonschema.Draft202012Validator)
    return found


@pytest.fixture
def model(tmp_path):
    """Return a model folder and a function that changes a few of its weights."""
    generator = torch.Generator().manual_seed(0)
    state = {"a": torch.randn(100, 50, generator=generator), "b": torch.zeros(7).bfloat16()}
    folder = tmp_path / "model"
    folder.mkdir()
    slimtensors.save(state, folder / "model.safetensors")

    def change(value):
        state["a"][:, 3] = value
        slimtensors.save(state, folder / "model.safetensors")
        return state

    return folder, change


def assert_has(path, state):
    loaded = slimtensors.load(path)
    assert loaded.keys() == state.keys()
    assert all(same_bits(loaded[name], x) for name, x in state.items())


def test_folders_and_files_follow_the_versions_of_a_folder(model, tmp_path, capsys):
    folder, change = model
    store, served, file = tmp_path / "run", tmp_path / "served", tmp_path / "x.safetensors"
    first = run(capsys, "publish", folder, store)
    assert (first["number"], first["step"], first["delta_bytes"]) == (1, 1, None)
    assert run(capsys, "follow", store, served, "--once")["from_keyframe"]
    state = change(5)
    second = run(capsys, "publish", folder, store, "--step", "40")
    assert (second["number"], second["step"], second["changed"]) == (2, 40, 100)
    update = run(capsys, "follow", store, served, "--once")  # another process, the same folder
    assert not update["from_keyframe"]
    assert update["tensors"] == 1
    assert_has(served, state)
    (served / "config.json").write_text("{}")
    run(capsys, "follow", store, file, "--once")
    assert_has(file, state)
    before = file.stat().st_mtime_ns
    assert run(capsys, "follow", store, file, "--once")["versions"] == 0
    assert file.stat().st_mtime_ns == before
    assert (served / "config.json").exists()
    versions = run(capsys, "list", store)["versions"]
    assert [v["step"] for v in versions] == [1, 40]


def test_without_json_a_sentence_describes_a_version(model, tmp_path, capsys):
    folder, change = model
    store = str(tmp_path / "run")
    assert main(["sync", "publish", str(folder), store]) == 0
    change(6)
    assert main(["sync", "publish", str(folder), store, "--keep", "1", "--keyframe"]) == 0
    assert main(["sync", "list", store]) == 0
    assert main(["sync", "follow", store, str(tmp_path / "y.safetensors"), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("version 1 (step 1): keyframe ")
    assert "2.00% changed" in lines[1]
    assert "bits per change), keyframe" in lines[1]
    assert lines[2] in lines[1]  # version 1 was removed
    assert lines[3].startswith("version 2 (step 2): 2 tensors changed from a keyframe")


def test_storage_options_reach_the_file_system(model, tmp_path, capsys):
    options = tmp_path / "options.json"
    options.write_text('{"auto_mkdir": true}')
    store = f"file://{tmp_path}/run"
    run(capsys, "publish", model[0], store, "--storage-options", f"@{options}")
    assert len(run(capsys, "list", store, "--storage-options", "{}")["versions"]) == 1
    for text in ("[1]", "{"):
        assert main(["sync", "list", store, "--storage-options", text]) == 2
    assert "--storage-options" in capsys.readouterr().err


def test_refusals_have_exit_codes(model, tmp_path, capsys):
    folder, store = model[0], tmp_path / "run"
    assert main(["sync", "list", str(store)]) == 2
    assert "no versions" in capsys.readouterr().err
    run(capsys, "publish", folder, store)
    slimtensors.save({"other": torch.zeros(2)}, tmp_path / "other.safetensors")
    for words in (
        ["publish", tmp_path / "other.safetensors", store],
        ["follow", store, tmp_path / "other.safetensors", "--once"],
    ):
        assert main(["sync", *map(str, words)]) == 1
    (store / "publisher.json").write_text('{"owner": "x", "host": "h", "pid": 3}')
    assert main(["sync", "publish", str(folder), str(store)]) == 2
    assert "process 3 on 'h' publishes here" in capsys.readouterr().err
    run(capsys, "publish", folder, store, "--takeover")
    assert main(["sync", "follow", str(store), str(store / "x"), "--once"]) == 2
    assert main(["sync", "follow", str(store), "x", "--interval", "0"]) == 2


@pytest.mark.slow
def test_a_follower_waits_for_versions_until_it_is_interrupted(model, tmp_path, capsys):
    folder, change = model
    store, file = tmp_path / "run", tmp_path / "x.safetensors"
    command = [sys.executable, "-m", "slimtensors", "sync", "follow", store, file, "--json"]
    process = subprocess.Popen(
        [*command, "--interval", "0.05"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert "no versions" in process.stderr.readline()
    run(capsys, "publish", folder, store)
    assert json.loads(process.stdout.readline())["number"] == 1
    state = change(3)
    run(capsys, "publish", folder, store)
    assert json.loads(process.stdout.readline())["number"] == 2
    assert_has(file, state)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    process.stdout.close()
    process.stderr.close()
