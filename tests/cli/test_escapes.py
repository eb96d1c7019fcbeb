"""Names in files must not control the terminal."""

import json
import shutil

import pytest
import torch

import slimtensors
from slimtensors.checkpoint import save_checkpoint
from slimtensors.cli import main
from slimtensors.report.collect import collect
from slimtensors.report.page import render_page

pytestmark = pytest.mark.hostile

NAMES = ("\x1b[31mred\x1b[0m", "two\nlines", "\u202egnp.exe", "bell\x07", "back\rwards", "\x9b2J")
HOSTILE = [name for name in "".join(NAMES) if not name.isprintable() and name != "\n"]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "m\x1b[31m.safetensors"
    tensors = {name: torch.randn(64, 64) for name in NAMES}
    tensors["zeros"] = torch.tensor([0.0, -0.0] * 500)
    slimtensors.save(tensors, path)
    return path


def run(capsys, *words):
    code = main([str(word) for word in words])
    captured = capsys.readouterr()
    for text in captured:
        assert not [c for c in HOSTILE if c in text]
    return code, captured.out, captured.err


def damage(path):
    raw = bytearray(path.read_bytes())
    for at in range(len(raw) - 90_000, len(raw), 4000):
        raw[at] ^= 1
    path.write_bytes(raw)


def test_names_in_tables_are_escaped(path, capsys):
    code, out, _ = run(capsys, "inspect", path)
    assert code == 0
    assert r"\x1b[31mred\x1b[0m" in out
    assert r"two\nlines" in out
    assert r"\u202egnp.exe" in out
    assert run(capsys, "inspect", path, "--markdown")[0] == 0
    assert run(capsys, "inspect", path, "--parts")[0] == 0


def test_names_in_json_are_escaped_and_survive(path, capsys):
    code, out, _ = run(capsys, "inspect", path, "--json")
    assert code == 0
    assert {t["name"] for t in json.loads(out)["tensors"]} >= set(NAMES)


def test_names_in_messages_are_escaped(path, capsys, tmp_path):
    damage(path)
    code, _, err = run(capsys, "verify", path)
    assert code == 3
    assert r"\u202egnp.exe" in err
    assert all(line.startswith(("slimtensors: ", "  ")) for line in err.splitlines())
    code, _, err = run(capsys, "decompress", path, "-o", tmp_path / "out")
    assert code == 3
    assert all(line.startswith(("slimtensors: ", "  ")) for line in err.splitlines())


def test_names_of_other_verbs_are_escaped(path, capsys, tmp_path):
    new = tmp_path / "new.safetensors"
    shutil.copy(path, new)
    for words in (
        ("compress", path, "-o", tmp_path / "c\x1b[31m"),
        ("decompress", path, "-o", tmp_path / "d"),
        ("diff", new, "--base", path, "-o", tmp_path / "delta\x1b"),
        ("restore", tmp_path / "delta\x1b", "--base", path, "-o", tmp_path / "r\x1b"),
        ("verify", new, "--against", path),
        ("inspect", tmp_path / "no\x1b[31mthing"),
    ):
        run(capsys, *words)


def test_names_of_runs_are_escaped(capsys, tmp_path):
    save_checkpoint({"w": torch.ones(3), "step": 1}, tmp_path / "run" / "1\x1b[31m")
    save_checkpoint({"w": torch.ones(3), "step": 2}, tmp_path / "run" / "2\x1b[31m")
    (tmp_path / "run" / "2\x1b[31m" / "checkpoint.json").write_text('{"\x1b": 1}')
    for verb in ("inspect", "verify", "repair"):
        run(capsys, verb, tmp_path / "run")


def test_names_in_reports_are_escaped(path):
    page = render_page(collect(path))
    assert not [c for c in HOSTILE if c in page]
    assert r"\\u202egnp.exe" in page
