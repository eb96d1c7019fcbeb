"""What only a process of its own can show: signals, terminals, pipes, missing packages."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
import torch
from models import weights
from safetensors.torch import save_file

import slimtensors

COMMAND = [sys.executable, "-m", "slimtensors"]


def run(*arguments, **options):
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(weights(), path)
    return path


def test_the_installed_command_answers(source):
    command = Path(sys.executable).with_name("slimtensors")
    done = subprocess.run([command, "inspect", source], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tensor")
    assert done.stderr == ""


def test_progress_is_not_shown_where_nobody_looks(source, tmp_path):
    done = run("compress", source, "-o", tmp_path / "y")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_progress_is_shown_in_bytes_on_a_terminal_and_leaves_no_trace_in_the_results(tmp_path):
    save_file({f"{i}": torch.zeros(1 << 20) for i in range(8)}, tmp_path / "x")
    terminal, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    command = [*COMMAND, "compress", str(tmp_path / "x"), "-o", str(tmp_path / "y")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=theirs, text=True)
    os.close(theirs)
    seen = b""
    try:
        while chunk := os.read(terminal, 4096):
            seen += chunk
    except OSError:  # the other side was closed
        pass
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.search(rb"compress: +\d+%.*/33\.6M", seen), seen
    assert out.startswith("8 tensors, 8 compressed")
    assert "%" not in out


def many(tmp_path):
    path = tmp_path / "many.safetensors"
    save_file({f"layer.{i:05d}.weight": torch.ones(1) for i in range(5000)}, path)
    return path


def test_a_reader_that_leaves_early_is_no_error(tmp_path):
    line = f"{sys.executable} -m slimtensors inspect {many(tmp_path)} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_reader_that_was_never_there_is_no_error(source):
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "inspect", str(source)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.slow
def test_130_is_an_interruption_and_nothing_is_left(tmp_path):
    big = {f"{i}": torch.ones(1 << 24) for i in range(8)}
    slimtensors.save(big, tmp_path / "x", preset="dense")
    (tmp_path / "y").write_text("old")
    command = [
        *COMMAND,
        "compress",
        tmp_path / "x",
        "-o",
        tmp_path / "y",
        "-f",
        "--preset",
        "dense",
    ]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    wait_for(lambda: list(tmp_path.glob(".*.slimtensors-tmp")), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err.startswith("slimtensors: interrupted")
    assert err.count("\n") == 1
    assert (tmp_path / "y").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "y"]


INTERRUPTER = """
import signal, sys

class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
"""


def test_other_programs_that_import_the_library_keep_their_own_way_to_tell_errors(tmp_path):
    package = tmp_path / "other"
    package.mkdir()
    (package / "__init__.py").write_text("import slimtensors")
    (package / "__main__.py").write_text("import sys; print(sys.excepthook is sys.__excepthook__)")
    command = [sys.executable, "-m", "other"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


INSTALLED = "import sys; from slimtensors.cli import main; sys.exit(main())"


@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-c", INSTALLED]])
def test_130_is_an_interruption_while_torch_is_imported(source, tmp_path, command):
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTER)
    done = subprocess.run(
        [*command, "inspect", source],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    said = (done.returncode, done.stdout, done.stderr)
    assert said == (130, "", "slimtensors: interrupted\n")


def wait_for(condition, process):
    for _ in range(2000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("it never began")


BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
from slimtensors.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("blocked", "source", "words"),
    [
        (["fsspec"], "memory://x", "this needs fsspec"),
        (["s3fs"], "s3://bucket/model", "s3fs"),
    ],
)
def test_4_is_a_missing_package_and_the_error_says_how_to_get_it(blocked, source, words):
    code = BLOCKER.format(blocked=blocked)
    command = [sys.executable, "-c", code, "inspect", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "pip install 'slimtensors[remote]'" in done.stderr


def test_local_files_need_no_optional_package(source, tmp_path):
    blocked = ["fsspec", "s3fs", "transformers", "accelerate", "matplotlib"]
    command = [sys.executable, "-c", BLOCKER.format(blocked=blocked), "compress", source, "-o"]
    subprocess.run([*command, tmp_path / "y"], check=True)
    assert slimtensors.verify(tmp_path / "y", against=source)
