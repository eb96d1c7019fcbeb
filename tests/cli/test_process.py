"""The command line as a process: signals, terminals, pipes, missing packages."""

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
from slimtensors.cli import main

COMMAND = [sys.executable, "-m", "slimtensors"]
PROGRAMS = Path(__file__).parent / "programs"
RUN_WITHOUT = [sys.executable, str(PROGRAMS / "run_without.py")]


def run(*arguments, **options):
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file(weights(), path)
    return path


def test_the_installed_command_runs(source):
    command = Path(sys.executable).with_name("slimtensors")
    done = subprocess.run([command, "inspect", source], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("tensor")
    assert done.stderr == ""


def test_progress_is_not_shown_without_a_terminal(source, tmp_path):
    done = run("compress", source, "-o", tmp_path / "y")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1


def test_progress_is_shown_in_bytes_on_a_terminal_but_not_in_stdout(tmp_path):
    save_file({f"{i}": torch.zeros(1 << 20) for i in range(8)}, tmp_path / "x")
    terminal, child_side = pty.openpty()
    termios.tcsetwinsize(child_side, (24, 80))
    command = [*COMMAND, "compress", str(tmp_path / "x"), "-o", str(tmp_path / "y")]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=child_side, text=True)
    os.close(child_side)
    output = b""
    try:
        while chunk := os.read(terminal, 4096):
            output += chunk
    except OSError:  # closed by the child
        pass
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert re.search(rb"compress: +\d+%.*/33\.6M", output), output
    assert out.startswith("8 tensors, 8 compressed")
    assert "%" not in out


def write_many(tmp_path):
    path = tmp_path / "many.safetensors"
    save_file({f"layer.{i:05d}.weight": torch.ones(1) for i in range(5000)}, path)
    return path


def test_a_pipe_closed_early_is_not_an_error(tmp_path):
    line = f"{sys.executable} -m slimtensors inspect {write_many(tmp_path)} | head -1"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout.count("\n") == 1
    assert done.stderr == ""


def test_a_pipe_closed_from_the_start_is_not_an_error(source):
    reading, writing = os.pipe()
    os.close(reading)
    command = [*COMMAND, "inspect", str(source)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writing)
    assert done.stderr == ""


@pytest.mark.slow
def test_exit_code_130_if_interrupted_and_no_leftovers(tmp_path):
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


def test_importing_the_library_does_not_change_the_excepthook(tmp_path):
    package = tmp_path / "other"
    package.mkdir()
    (package / "__init__.py").write_text("import slimtensors")
    (package / "__main__.py").write_text("import sys; print(sys.excepthook is sys.__excepthook__)")
    command = [sys.executable, "-m", "other"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"


INSTALLED = "import sys; from slimtensors.cli import main; sys.exit(main())"


@pytest.mark.parametrize("command", [COMMAND, [sys.executable, "-c", INSTALLED]])
def test_exit_code_130_if_interrupted_while_torch_is_imported(source, command):
    done = subprocess.run(
        [*command, "inspect", source],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(PROGRAMS / "interrupt_import")},
    )
    result = (done.returncode, done.stdout, done.stderr)
    assert result == (130, "", "slimtensors: interrupted\n")


class InterruptedWhenFreed:
    def __del__(self):
        signal.raise_signal(signal.SIGINT)  # Python prints this exception and ignores it


def test_an_interrupt_in_a_finalizer_is_not_lost(monkeypatch, capsys):
    def run(options):
        InterruptedWhenFreed()
        time.sleep(60)

    monkeypatch.setattr("slimtensors.cli.codecs.run", run)
    assert main(["codecs"]) == 130
    assert capsys.readouterr().err == "slimtensors: interrupted\n"


def wait_for(condition, process):
    for _ in range(2000):
        if condition():
            return
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    raise AssertionError("timeout: the command did not start writing")


@pytest.mark.parametrize(
    ("package", "source", "words"),
    [
        ("fsspec", "memory://x", "this needs fsspec"),
        ("s3fs", "s3://bucket/model", "s3fs"),
    ],
)
def test_exit_code_4_if_a_package_is_missing_and_how_to_install_it(package, source, words):
    command = [*RUN_WITHOUT, package, "inspect", source]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert words in done.stderr
    assert "pip install 'slimtensors[remote]'" in done.stderr


def test_local_files_need_no_optional_package(source, tmp_path):
    packages = "fsspec,s3fs,transformers,accelerate,matplotlib"
    command = [*RUN_WITHOUT, packages, "compress", source, "-o", tmp_path / "y"]
    subprocess.run(command, check=True)
    assert slimtensors.verify(tmp_path / "y", against=source)
