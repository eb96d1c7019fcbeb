"""The demo: what it leaves, what it says, and that it leaves nothing when it cannot go on."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from models import CONFIG, write_folder

import slimtensors
from slimtensors.cli import main
from slimtensors.cli.demo import training as text
from slimtensors.cli.demo.store import WAYS
from slimtensors.cli.demo.training import RUNS
from slimtensors.codecs.statistics import is_24
from slimtensors.report import read_report

COMMAND = [sys.executable, "-m", "slimtensors", "demo"]
FOLDERS = ["dense", *RUNS.values(), *(way.folder for way in WAYS)]


def run(*arguments):
    return main(["demo", *(str(argument) for argument in arguments)])


def one_line(capsys):
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("slimtensors: ")
    assert said.err.count("\n") == 1
    return said.err


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """What a quick demo leaves and says."""
    folder = tmp_path_factory.mktemp("demo")
    command = [*COMMAND, "--quick", "-o", str(folder / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return folder / "out", done.stdout


@pytest.mark.slow
def test_the_demo_shows_every_way_in_one_table(shown):
    folder, said = shown
    head, *lines = said.split("\n\n")[0].splitlines()
    assert head.split()[:4] == ["stored", "as", "size", "smaller"]
    names = [re.split(r"\s{2,}", line)[0] for line in lines]
    chains = [f"8 checkpoints, {profile}" for profile in ("exact", "optimizer")]
    assert names == ["dense", *(way.name for way in WAYS), *chains]
    assert re.search(r"same weights, moments [1-9]\.\d\d%", lines[-1])
    assert said.count("same bits") == 3, "dense, lossless and the checkpoints"
    assert said.count(" writes: def __init__(self, ") == 2
    assert "left out" not in said
    assert f"Look at {folder / 'report.html'}" in said
    assert sorted(p.name for p in folder.iterdir()) == sorted(
        [*FOLDERS, "report.html", "report.json"]
    )


@pytest.mark.slow
def test_the_demo_leaves_models_that_load_and_checkpoints_that_are_whole(shown):
    folder, _ = shown
    dense = slimtensors.load(folder / "dense")
    assert {x.dtype for x in dense.values()} == {torch.bfloat16}
    assert slimtensors.verify(folder / "lossless", against=folder / "dense")
    name = "model.layers.0.mlp.up_proj.weight"
    assert is_24(slimtensors.load(folder / "sparse-24")[name])
    assert (slimtensors.load(folder / "sparse-50")[name] == 0).float().mean() >= 0.5
    for run in RUNS.values():
        assert main(["verify", str(folder / run)]) == 0
    codes = slimtensors.load(folder / "w4a16-gptq")
    assert {x.dtype for x in codes.values()} == {torch.bfloat16, torch.int32, torch.int64}
    assert json.loads((folder / "w4a16-gptq/config.json").read_text())["quantization_config"]


@pytest.mark.slow
def test_the_report_of_the_demo_says_what_the_table_says(shown):
    folder, said = shown
    report = read_report(folder / "report.json")
    assert [v.name for v in report.variants] == ["dense", *(way.name for way in WAYS)]
    assert len(report.checkpoints) == 8
    for variant in report.variants:
        assert variant.measured.keys() == {"perplexity", "save_seconds", "load_seconds"}
        assert f"{8 * variant.stored_bytes / variant.items:.2f}" in said
    by_name = {v.name: v for v in report.variants}
    assert by_name["lossless"].is_exact
    lossless, dense = (by_name[name].measured["perplexity"] for name in ("lossless", "dense"))
    assert lossless == pytest.approx(dense, rel=1e-5)
    assert 0.02 < by_name["W4A16 RTN"].error < 0.2
    assert by_name["W4A16 GPTQ"].stored_bytes == by_name["W4A16 RTN"].stored_bytes
    page = (folder / "report.html").read_text()
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page


@pytest.mark.slow
def test_the_demo_takes_a_model_of_ones_own(shown, tmp_path, capsys):
    folder, _ = shown
    assert run("--model", folder / "dense", "--quick", "-o", tmp_path / "out") == 0
    said = capsys.readouterr().out
    assert said.count("same bits") == 3
    again, first = (read_report(f / "report.json") for f in (tmp_path / "out", folder))
    assert again.title == "dense"
    sizes = [[v.stored_bytes for v in report.variants] for report in (again, first)]
    # Threads add up in another order, and that can move a weight that was pruned.
    assert sizes[0] == pytest.approx(sizes[1], rel=1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda at: None, "no such folder"),
        (lambda at: at.write_text("text"), "no such folder"),
        (lambda at: at.mkdir(), "is no model; it has no config.json"),
        (lambda at: write_folder(at, config={"model_type": "llama"}), "names no class"),
        (lambda at: write_folder(at, config=CONFIG), "has no tokenizer"),
    ],
)
def test_what_is_no_model_is_refused_in_one_line(tmp_path, capsys, make, words):
    make(tmp_path / "m")
    assert run("--model", tmp_path / "m", "-o", tmp_path / "out") == 2
    assert words in one_line(capsys)
    assert not (tmp_path / "out").exists()


def test_a_model_without_weights_is_refused_in_one_line(tmp_path, capsys):
    write_folder(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    assert run("--model", tmp_path / "m", "-o", tmp_path / "out") == 3
    assert "no safetensors files found" in one_line(capsys)
    (tmp_path / "m" / "model.safetensors").write_text("nonsense")
    assert run("--model", tmp_path / "m", "-o", tmp_path / "out") == 3
    assert "model.safetensors" in one_line(capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_options_that_make_no_sense_are_refused(tmp_path, capsys):
    (tmp_path / "there").mkdir()
    assert run("-o", tmp_path / "there") == 2
    assert "already exists; use -f to replace it" in one_line(capsys)
    for steps in (0, 1):
        assert run("-o", tmp_path / "out", "--steps", steps) == 2
        assert "--steps" in one_line(capsys)
    (tmp_path / "there" / "diary.txt").write_text("dear diary")
    assert run("-o", tmp_path / "there", "-f", "--quick") == 2
    assert "contains files but no model" in one_line(capsys)


def test_a_full_disk_is_found_before_anything_is_done(tmp_path, capsys, monkeypatch):
    few = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: few)
    assert run("-o", tmp_path / "deep" / "out", "--quick") == 2
    assert "needs about 440.0 MB, and 1.0 MB are free" in one_line(capsys)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_disk_that_fills_up_leaves_one_line_and_nothing_else(tmp_path):
    def limit():  # as a full disk does: writing on fails in the middle of a file
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

    done = subprocess.run(
        [*COMMAND, "--quick", "-o", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=limit,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "File too large" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_refused_in_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("a file")
    assert run("-o", tmp_path / "file" / "out", "--quick") == 2
    assert "file" in one_line(capsys)
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        assert run("-o", tmp_path / "locked" / "out", "--quick") == 2
        assert "Permission denied" in one_line(capsys)


BLOCKED = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "transformers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
from slimtensors.cli import main
sys.exit(main(sys.argv[1:]))
"""


def test_4_is_a_demo_without_transformers(tmp_path):
    command = [sys.executable, "-c", BLOCKED, "demo", "-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr.count("\n") == 1
    assert "pip install 'slimtensors[transformers]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_130_is_a_demo_that_was_interrupted_and_nothing_is_left(tmp_path):
    command = [*COMMAND, "--steps", "4000", "--quick", "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    for _ in range(6000):
        if list(tmp_path.glob(".*/checkpoints")):
            break
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err == "slimtensors: interrupted\n"
    assert list(tmp_path.iterdir()) == []


def test_the_text_is_there_and_what_is_measured_was_not_learnt():
    seen, unseen = text.training_text(), text.evaluation_text()
    assert len(seen) > 1_000_000 < 10 * len(unseen)
    assert unseen[5000:5200] not in seen
    assert Path(text.LIBRARY / "os.py").exists()
    assert torch.equal(text.text_rows(seen, 3, seed=1), text.text_rows(seen, 3, seed=1))
