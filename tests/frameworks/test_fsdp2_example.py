"""The FSDP2 example: killed and resumed under torchrun, and with the storage classes of torch."""

import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from process_tools import torchrun
from slimtensors.distributed import StorageReader
from strategies import same_bits
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

EXAMPLE = Path(__file__).parents[2] / "examples" / "fsdp2_checkpoints.py"
STEPS = "80"

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is (disabled|unavailable)")


def start(folder):
    """Start the example on two ranks."""
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "STEPS": STEPS}
    return subprocess.Popen(
        [*command, EXAMPLE], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )


def list_processes(pid):
    """Return a process and its children, from the outside in."""
    found = [pid]
    for process in found:
        text = Path(f"/proc/{process}/task/{process}/children").read_text()
        found += map(int, text.split())
    return found


def flatten(value, path=""):
    """Return all values of a state by path."""
    if isinstance(value, dict):
        return {k: x for key in value for k, x in flatten(value[key], f"{path}/{key}").items()}
    return {path: value}


def equal_states(a, b):
    a, b = flatten(a), flatten(b)
    assert a.keys() == b.keys()
    for name, x in a.items():
        if isinstance(x, torch.Tensor):
            assert same_bits(x, b[name]), name
        else:
            assert x == b[name], name
    return len(a)


def read(reader):
    return _load_state_dict_from_keys(storage_reader=reader)


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_killed_run_resumes_to_the_weights_of_an_uninterrupted_one(tmp_path):
    whole, killed = start(tmp_path / "whole"), start(tmp_path / "killed")
    manifest = tmp_path / "killed" / "checkpoint" / "distributed.json"
    while not manifest.exists():
        assert killed.poll() is None
        time.sleep(0.005)
    for pid in list_processes(killed.pid):
        os.kill(pid, signal.SIGKILL)
    assert "finished" not in killed.communicate()[0]
    assert whole.communicate()[0].splitlines()[-1] == f"finished at step {STEPS}"

    resumed = torchrun(2, script=EXAMPLE, cwd=tmp_path / "killed", STEPS=STEPS)
    assert resumed.returncode == 0, resumed.stderr
    first = int(resumed.stdout.split()[3])
    assert 0 < first < int(STEPS)

    states = [read(StorageReader(tmp_path / name / "checkpoint")) for name in ("whole", "killed")]
    assert equal_states(*states) > 10
    assert states[0]["step"] == int(STEPS)
    assert not list((tmp_path / "killed").rglob(".*"))


@pytest.mark.filterwarnings("ignore:Detected an existing checkpoint")
def test_the_import_is_the_only_line_that_differs_from_plain_torch(tmp_path, monkeypatch):
    lines = EXAMPLE.read_text().splitlines()
    at = lines.index("# Plain torch:")
    native = [*lines[:at], *(line.removeprefix("# ") for line in lines[at + 1 : at + 3])]
    assert lines[at + 3] == "from slimtensors.distributed import StorageReader, StorageWriter"
    script = tmp_path / "native.py"
    script.write_text("\n".join([*native, *lines[at + 4 :]]))
    assert "slimtensors" not in script.read_text()
    for name, path in (("ours", EXAMPLE), ("torch", script)):
        (tmp_path / name).mkdir()
        monkeypatch.chdir(tmp_path / name)
        runpy.run_path(str(path), run_name="__main__")
    ours = read(StorageReader(tmp_path / "ours" / "checkpoint"))
    assert equal_states(ours, read(FileSystemReader(tmp_path / "torch" / "checkpoint"))) > 10
