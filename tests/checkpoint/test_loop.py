"""Checkpoints in a training loop."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading

import jsonschema
import pytest
import torch
from reliability_tools import TESTS, run
from strategies import bits, same_bits
from torch import nn
from training import Run

from slimtensors.checkpoint import (
    checkpointing,
    is_run,
    load_checkpoint,
    points,
    repair_run,
    verify_run,
)
from slimtensors.checkpoint.loop import Snapshot
from slimtensors.cli import main
from slimtensors.errors import ConfigError, FormatError, InUseError, MismatchError
from slimtensors.tensor import DTYPES


def looped(run, folder, **options):
    return checkpointing(folder, *run.parts(), dataloader=run.batches, **options)


def names(folder):
    return [point.name for point in points(folder)]


@pytest.mark.parametrize("async_", [True, False])
def test_an_interrupted_run_goes_on_bit_for_bit(tmp_path, async_):
    whole = Run()
    losses = whole.train(30)
    run, seen = Run(), []
    with looped(run, tmp_path, every=4, async_=async_) as ckpt:
        assert ckpt.start == 0
        for _ in range(14):
            seen += run.train(1)
            ckpt.step(loss=seen[-1])
    run = Run(seed=3)
    with looped(run, tmp_path, every=4, async_=async_) as ckpt:
        assert ckpt.start == 12
        assert ckpt.resumed["metrics"] == {"loss": seen[11]}
        seen = seen[: ckpt.start]
        for _ in range(ckpt.start, 30):
            seen += run.train(1)
            ckpt.step()
    assert seen == losses
    assert names(tmp_path) == [f"step-{step:08d}" for step in range(4, 30, 4)]
    assert verify_run(tmp_path)


def test_the_loop_waits_for_the_copy_only(tmp_path):
    run, may_write = Run(), threading.Event()
    committed = []

    def hold(path):
        committed.append(path)
        may_write.wait(30)

    with looped(run, tmp_path, every=2, on_commit=hold) as ckpt:
        run.train(2)
        ckpt.step(2)
        before = [p.detach().clone() for p in run.model.parameters()]
        run.train(1)  # while that save is under way
        ckpt.step(3)
        may_write.set()
        ckpt.wait()
    saved = load_checkpoint(committed[0])
    names_of = [name for name, _ in run.model.named_parameters()]
    assert all(same_bits(saved["model"][n], p) for n, p in zip(names_of, before, strict=True))
    assert saved["step"] == 2


def test_what_goes_wrong_in_the_background_surfaces_at_the_next_call(tmp_path, monkeypatch):
    run = Run()

    def fail(descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with looped(run, tmp_path, every=1) as ckpt:
        ckpt.step()
        ckpt.wait()
        monkeypatch.setattr(os, "fsync", fail)
        ckpt.step()
        with pytest.raises(OSError, match="No space left"):
            ckpt.save()
        monkeypatch.undo()
        ckpt.step()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]


def test_a_failed_save_is_noted_on_the_error_that_ends_the_loop(tmp_path):
    def fail(path):
        raise RuntimeError("no upload")

    def train():
        with looped(Run(), tmp_path, every=1, on_commit=fail) as ckpt:
            ckpt.step()
            raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        train()
    assert "no upload" in caught.value.__notes__[0]


def kept(tmp_path, metrics, **options):
    run = Run()
    with looped(run, tmp_path, every=1, async_=False, **{"base": None, **options}) as ckpt:
        for value in metrics:
            ckpt.step(loss=value)
    return [int(name.removeprefix("step-")) for name in names(tmp_path)]


def test_the_last_the_best_and_every_nth_are_kept(tmp_path):
    losses = [5, 4, 1, 6, 7, 8, 9]
    assert kept(tmp_path / "a", losses, keep_last=2) == [6, 7]
    assert kept(tmp_path / "b", losses, keep_last=1, keep_best="loss") == [3, 7]
    assert kept(tmp_path / "c", losses, keep_best="loss", best_is="max") == [7]
    assert kept(tmp_path / "d", losses, keep_every=3) == [3, 6, 7]
    assert kept(tmp_path / "e", losses) == [1, 2, 3, 4, 5, 6, 7]
    assert not list(tmp_path.rglob("*slimtensors-tmp"))


def test_the_new_one_is_there_before_an_old_one_goes(tmp_path, monkeypatch):
    import slimtensors.checkpoint.loop as loop

    removed = []

    def watch(path):
        removed.append((path.name, names(tmp_path)[-1]))

    monkeypatch.setattr(loop, "remove_folder", watch)
    kept(tmp_path, [1, 2, 3], keep_last=1)
    assert removed[0] == ("step-00000001", "step-00000002")


def test_a_damaged_newest_one_is_passed_over_aloud(tmp_path, caplog):
    run = Run()
    with looped(run, tmp_path, every=1, async_=False) as ckpt:
        run.train(1)
        ckpt.step()
        run.train(1)
        ckpt.step()
    file = tmp_path / "step-00000002" / "state.safetensors"
    raw = bytearray(file.read_bytes())
    raw[-9] ^= 1
    file.write_bytes(raw)
    assert list(verify_run(tmp_path).damaged) == ["step-00000002"]
    with caplog.at_level(logging.WARNING), looped(Run(), tmp_path) as ckpt:
        assert ckpt.start == 1
    assert "step-00000002: cannot be resumed from" in caplog.text
    (tmp_path / "step-00000001" / "state.safetensors").write_bytes(b"")
    with pytest.raises(FormatError, match="none of its 2 checkpoints"), looped(Run(), tmp_path):
        pass


def test_another_model_does_not_resume_and_an_old_run_is_not_overwritten(tmp_path):
    with looped(Run(), tmp_path, every=1) as ckpt:
        ckpt.step()
    with pytest.raises(MismatchError, match=r"words\.weight"), looped(Run(width=16), tmp_path):
        pass
    with (
        pytest.raises(ConfigError, match="resume, or choose"),
        looped(Run(), tmp_path, resume=False),
    ):
        pass


def test_a_second_process_is_refused(tmp_path):
    code = "import sys, training; from slimtensors.checkpoint import checkpointing\n"
    code += "with checkpointing(sys.argv[1], training.Run().model): pass"
    with looped(Run(), tmp_path):
        with (
            pytest.raises(InUseError, match=f"in use by process {os.getpid()}"),
            looped(Run(), tmp_path),
        ):
            pass
        command = [sys.executable, "-c", code, str(tmp_path)]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert "InUseError" in done.stderr
        with pytest.raises(InUseError):
            repair_run(tmp_path)
    with looped(Run(), tmp_path):
        pass


TERMINATED = """
import os, signal, sys, training
from slimtensors.checkpoint import checkpointing
run = training.Run()
with checkpointing(sys.argv[1], *run.parts(), every=1000) as ckpt:
    for step in range(5):
        if step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        run.train(1)
        ckpt.step()
    print("went on")
"""


def test_sigterm_saves_and_ends(tmp_path):
    command = [sys.executable, "-c", TERMINATED, str(tmp_path)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, ""), done.stderr
    assert names(tmp_path) == ["step-00000004"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_bad_options_are_told(tmp_path):
    for options in ({"every": 0}, {"keep_last": 0}, {"keep_every": 1.5}, {"best_is": "least"}):
        with pytest.raises(ConfigError):
            looped(Run(), tmp_path, **options)


def test_a_snapshot_reuses_its_memory_and_keeps_what_is_tied():
    x = torch.randn(4, 5)
    state = {"a": x, "b": {"c": x.t(), "again": x}, "n": 1}
    snapshot = Snapshot()
    taken = snapshot.take(state).tensors
    places = {name: y.data_ptr() for name, y in taken.items()}
    assert taken["a"] is taken["b.again"]
    x.add_(1)
    assert not same_bits(taken["a"], x)
    taken = snapshot.take(state).tensors
    assert {name: y.data_ptr() for name, y in taken.items()} == places
    assert same_bits(taken["a"], x)
    assert same_bits(taken["b.c"], x.t())


def test_a_snapshot_of_what_is_trained_is_plain_data():
    state = {
        "weight": nn.Parameter(torch.randn(3, 3)),
        "small": torch.randn(8).to(torch.float8_e5m2),
        "other": torch.randn(2, dtype=torch.complex64).conj(),
        "none": torch.empty(0),
    }
    taken = Snapshot().take(state).tensors
    assert not any(y.requires_grad or y.is_conj() for y in taken.values())
    assert all(same_bits(y, state[name].detach().resolve_conj()) for name, y in taken.items())


@pytest.mark.parametrize("name", DTYPES)
def test_a_snapshot_takes_every_dtype(name):
    x = bits(1, 24, DTYPES[name], 0.9)
    assert same_bits(Snapshot().take({"x": x}).tensors["x"], x)


def fitting(schema, capsys):
    """Return the JSON that was printed, which must be as its schema says."""
    printed = json.loads(capsys.readouterr().out)
    path = TESTS.parent / "docs" / "schemas" / f"{schema}.json"
    jsonschema.validate(printed, json.loads(path.read_text()))
    return printed


def test_a_run_on_the_command_line(tmp_path, capsys):
    folder = tmp_path / "run"
    kept(folder, [3, 2], base="auto")
    assert is_run(folder)
    assert main(["inspect", str(folder)]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["checkpoint", "kind", "profile", "base", "step", "stored", "age"]
    assert table[2].startswith("step-00000002  delta  exact    step-00000001     2")
    assert main(["inspect", str(folder), "--json"]) == 0
    told = fitting("run", capsys)["checkpoints"]
    assert [(t["step"], t["metrics"]) for t in told] == [(1, {"loss": 3.0}), (2, {"loss": 2.0})]
    assert main(["verify", str(folder)]) == 0
    assert "2 checkpoints intact" in capsys.readouterr().out

    (folder / ".step-00000003.abc.slimtensors-tmp").mkdir()
    assert main(["verify", str(folder)]) == 3
    assert ".step-00000003.abc.slimtensors-tmp: incomplete" in capsys.readouterr().err
    assert main(["repair", str(folder)]) == 0
    assert "1 incomplete checkpoint removed" in capsys.readouterr().out
    assert main(["verify", str(folder), "--json"]) == 0
    assert fitting("verify-run", capsys)["checkpoints"] == 2
    assert main(["repair", str(folder), "--json"]) == 0
    assert fitting("repair", capsys) == {"removed": [], "left": {}}


def damage(about, kind):
    raw = about.read_bytes()
    match kind:
        case "a flipped bit":
            about.write_bytes(bytes([raw[0] ^ 1]) + raw[1:])
        case "a newer version":
            about.write_bytes(raw.replace(b'"version": 1', b'"version": 2'))
        case "an unknown key":
            about.write_bytes(raw.replace(b'"version": 1', b'"version": 1, "sealed": true'))
        case "an empty file":
            about.write_bytes(b"")
        case "no file":
            about.unlink()
        case "a folder":
            about.unlink()
            about.mkdir()
        case "another program's":
            about.write_bytes(b'{"epoch": 3}')
    assert not about.is_file() or about.read_bytes() != raw


DAMAGE = [
    "a flipped bit",
    "a newer version",
    "an unknown key",
    "an empty file",
    "no file",
    "a folder",
    "another program's",
]


def content(folder):
    return {p: p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("step", [1, 2, 3])
def test_an_unreadable_checkpoint_stays_and_is_reported(tmp_path, caplog, capsys, kind, step):
    folder = tmp_path / "run"
    kept(folder, [3, 2, 1], base=None if step == 1 else "auto")
    name = f"step-{step:08d}"
    damage(folder / name / "checkpoint.json", kind)
    before = content(folder / name)
    (folder / "logs").mkdir()
    (folder / ".step-00000004.abc.slimtensors-tmp").mkdir()

    assert main(["verify", str(folder), "--json"]) == 3
    assert name in fitting("verify-run", capsys)["damaged"]
    assert repair_run(folder) == [".step-00000004.abc.slimtensors-tmp"]
    assert main(["repair", str(folder), "--json"]) == 0
    assert list(fitting("repair", capsys)["left"]) == [name]
    assert main(["repair", str(folder)]) == 0
    assert f"{name}: unreadable, left as it is" in capsys.readouterr().err

    caplog.clear()
    run = Run()
    with looped(run, folder, every=1, keep_last=1) as ckpt:
        start = ckpt.start
        for _ in range(start, 5):
            run.train(1)
            ckpt.step()
    assert start == (2 if step == 3 else 3)
    assert f"{name}: unreadable checkpoint left as it is" in caplog.text
    assert names(folder)[-1] == "step-00000005"
    assert content(folder / name) == before
    assert (folder / "logs").is_dir()


def test_no_flipped_bit_of_a_description_removes_a_checkpoint(tmp_path):
    kept(tmp_path, [1])
    about = tmp_path / "step-00000001" / "checkpoint.json"
    raw = about.read_bytes()
    for i in range(0, 8 * len(raw), 3):
        flipped = bytearray(raw)
        flipped[i // 8] ^= 1 << i % 8
        about.write_bytes(flipped)
        assert repair_run(tmp_path) == []
        assert about.read_bytes() == flipped
    assert (tmp_path / "step-00000001" / "state.safetensors").exists()


@pytest.mark.parametrize("kind", ["a flipped bit", "a newer version", "an unknown key"])
def test_the_base_of_an_unreadable_delta_stays(tmp_path, kind):
    kept(tmp_path, [2, 1], base="auto")
    about = tmp_path / "step-00000002" / "checkpoint.json"
    raw = about.read_bytes()
    damage(about, kind)
    with looped(Run(), tmp_path, every=1, keep_last=1, base=None) as ckpt:
        ckpt.step()
        ckpt.step()
    assert names(tmp_path) == ["step-00000001", "step-00000003"]
    about.write_bytes(raw)
    load_checkpoint(tmp_path / "step-00000002")


def test_an_unreadable_keyframe_ends_a_resume_and_its_deltas_stay(tmp_path):
    kept(tmp_path, [2, 1], base="auto")
    about = tmp_path / "step-00000001" / "checkpoint.json"
    raw = about.read_bytes()
    damage(about, "a flipped bit")
    with pytest.raises(FormatError, match="none of its 1 checkpoints"), looped(Run(), tmp_path):
        pass
    about.write_bytes(raw)
    with looped(Run(), tmp_path) as ckpt:
        assert ckpt.start == 2


def test_a_save_of_the_step_of_an_unreadable_one_takes_another_name(tmp_path):
    kept(tmp_path, [2, 1], base="auto")
    damage(tmp_path / "step-00000002" / "checkpoint.json", "an empty file")
    with looped(Run(), tmp_path, every=1) as ckpt:
        ckpt.step()
    assert names(tmp_path) == ["step-00000001", "step-00000002-2"]
    with looped(Run(), tmp_path) as ckpt:
        assert ckpt.start == 2


def test_only_names_of_our_own_writer_are_removed(tmp_path):
    kept(tmp_path, [1])
    strangers = ["x.slimtensors-tmp", ".x.tmp", "step-00000009.tmp", ".hidden"]
    for name in strangers:
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.safetensors").write_bytes(b"")
    (tmp_path / ".y.slimtensors-tmp").symlink_to(tmp_path / ".hidden")
    (tmp_path / ".z.slimtensors-tmp").mkdir()
    assert repair_run(tmp_path) == [".z.slimtensors-tmp"]
    assert all((tmp_path / name / "state.safetensors").exists() for name in strangers)


KILLED = """
import os, random, signal, sys, time
from pathlib import Path
import torch, training
from slimtensors.checkpoint import checkpointing, load_checkpoint, points
torch.set_num_threads(1)

folder, count = Path(sys.argv[1]), int(sys.argv[2])
run = training.Run()
run.train(1)
chance = random.Random(0)
whole = 0

def child(tell):
    with checkpointing(folder, *run.parts(), every=1, keep_last=2, threads=1) as ckpt:
        while True:
            ckpt.step()
            os.write(tell, b".")

last, begun = 0, 1e-3
for _ in range(count):
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        child(tell)
    os.read(hear, 1)
    start = time.monotonic()
    for _ in range(chance.randrange(3)):
        os.read(hear, 1)
        start, begun = time.monotonic(), time.monotonic() - start
    time.sleep(chance.uniform(0, 2 * begun))  # somewhere in the two saves that come now
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(hear)
    os.close(tell)
    found = points(folder)
    for point in found:
        load_checkpoint(point.path, threads=1)
    newest = found[-1].manifest.step if found else 0
    assert newest >= last, (last, found)
    last = newest
    whole += len(found)
print(last, whole)
"""


@pytest.mark.slow
@pytest.mark.crash
@pytest.mark.skipif(sys.platform != "linux", reason="forks")
def test_killed_at_any_moment_the_newest_complete_one_loads(tmp_path):
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path  # where fsync is free
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        last, whole = map(int, run(KILLED, folder, 100, timeout=300).split())
    assert last > 100
    assert whole > 100
