"""Retention in the presence of damaged and foreign checkpoints, and metrics of any type."""

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from checkpoint.manifests import unseal_manifest
from torch import nn

from slimtensors.checkpoint import (
    checkpointing,
    find_unreadable,
    is_run,
    list_checkpoints,
    load_checkpoint,
    remove_checkpoint,
    save_checkpoint,
    verify_run,
)
from slimtensors.checkpoint.loop_folder import LoopFolder, RunIntegrity
from slimtensors.checkpoint.manifest import read_manifest
from slimtensors.checkpoint.run import Retention
from slimtensors.errors import ConfigError, FormatError, MismatchError


def start(folder, **options):
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    options = {"every": 1, "async_": False, **options}
    return checkpointing(folder, model, torch.optim.SGD(model.parameters(), lr=0.1), **options)


def change_weights(ckpt):
    with torch.no_grad():
        ckpt._objects.model.weight.mul_(1.01)


def save_steps(folder, metrics, **options):
    """Run one step per metric; return the steps that are on disk, and the first step."""
    with start(folder, **options) as ckpt:
        for value in metrics:
            change_weights(ckpt)
            ckpt.step(loss=value)
    return list_steps(folder), ckpt.start


def list_steps(folder):
    return [point.manifest.step for point in list_checkpoints(folder)]


def damage_state(folder, step):
    """Flip a bit in the data of a checkpoint; its manifest stays valid."""
    path = folder / f"step-{step:08d}" / "state.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-9] ^= 1
    path.write_bytes(raw)


def loads(folder, step):
    return load_checkpoint(folder / f"step-{step:08d}")["step"] == step


@pytest.mark.parametrize("base", [None, "auto", "chain"])
def test_a_damaged_newest_checkpoint_never_counts(tmp_path, caplog, base):
    save_steps(tmp_path, [1, 1, 1], base=base)
    damage_state(tmp_path, 3)
    steps, first = save_steps(tmp_path, [1], base=base, keep_last=1)
    assert first == 2
    assert steps[-1] == 3
    assert loads(tmp_path, 3)
    assert (tmp_path / "damaged-step-00000003" / "checkpoint.json").is_file()
    assert "damaged checkpoint renamed to damaged-step-00000003" in caplog.text
    steps, first = save_steps(tmp_path, [1, 1], base=base, keep_last=1)
    assert first == 3
    assert loads(tmp_path, 5)
    assert (tmp_path / "damaged-step-00000003").is_dir()


def test_a_damaged_checkpoint_of_a_later_step_never_counts(tmp_path):
    save_steps(tmp_path, [1] * 8, base=None)
    damage_state(tmp_path, 8)
    shutil.rmtree(tmp_path / "step-00000007")
    steps, first = save_steps(tmp_path, [1], base=None, keep_last=1)
    assert first == 6
    assert steps == [7, 8]  # the damaged one stays
    assert loads(tmp_path, 7)


def test_good_deltas_of_a_damaged_base_stay_and_do_not_count(tmp_path):
    save_steps(tmp_path, [1] * 2, base=None)
    save_steps(tmp_path, [1] * 2, base="auto")
    for name in ("step-00000003", "step-00000004"):
        assert read_manifest(tmp_path / name).base.name == "step-00000002"
    damage_state(tmp_path, 2)
    steps, first = save_steps(tmp_path, [1], base="auto", keep_last=1)
    assert first == 1
    assert (tmp_path / "damaged-step-00000002").is_dir()
    assert {3, 4} <= set(steps)
    assert loads(tmp_path, 2)


def test_a_save_is_complete_if_its_base_is_damaged(tmp_path, caplog):
    with start(tmp_path, base="auto") as ckpt:
        ckpt.step()
        damage_state(tmp_path, 1)
        change_weights(ckpt)
        saved = ckpt.step()
        assert saved.manifest.kind == "full"
        change_weights(ckpt)
        assert ckpt.step().manifest.base.name == "step-00000002"
    assert "step-00000001: unusable checkpoint" in caplog.text


def test_a_base_that_is_damaged_after_its_verification_is_not_used(tmp_path, caplog):
    with start(tmp_path, base="auto", keep_last=3) as ckpt:
        ckpt.step()
        change_weights(ckpt)
        assert ckpt.step().manifest.kind == "delta"
        damage_state(tmp_path, 1)
        change_weights(ckpt)
        assert ckpt.step().manifest.kind == "full"
    assert "saved in full, because the base cannot be read" in caplog.text


def test_a_damaged_best_checkpoint_does_not_count_as_best(tmp_path):
    save_steps(tmp_path, [3, 1, 2, 4], base=None)
    damage_state(tmp_path, 2)
    steps, _ = save_steps(tmp_path, [5], base=None, keep_last=1, keep_best="loss")
    assert steps == [2, 3, 5]
    assert loads(tmp_path, 3)


def test_a_new_checkpoint_is_read_before_older_ones_are_removed(tmp_path, monkeypatch):
    save_steps(tmp_path, [1] * 3, base=None)
    sync, new = os.fsync, tmp_path / "step-00000004"

    def damage_new(descriptor):
        sync(descriptor)
        if new.exists():
            damage_state(tmp_path, 4)
            monkeypatch.setattr(os, "fsync", sync)

    monkeypatch.setattr(os, "fsync", damage_new)
    with start(tmp_path, base=None, keep_last=1) as ckpt:
        ckpt.step()
        assert list_steps(tmp_path) == [3, 4]
        assert loads(tmp_path, 3)
        ckpt.step()
        assert list_steps(tmp_path) == [4, 5]


def test_nothing_is_removed_if_no_checkpoint_is_intact(tmp_path, caplog):
    save_steps(tmp_path, [1] * 3, base=None)
    with start(tmp_path, base=None, keep_last=1, every=100) as ckpt:
        for step in (1, 2, 3):
            damage_state(tmp_path, step)
        ckpt._folder.integrity = RunIntegrity(tmp_path)  # as in a process that read none of them
        ckpt._folder.apply_retention(Retention(last=1), keep_history=False)
    assert list_steps(tmp_path) == [1, 2, 3]
    assert "no intact checkpoint; nothing is removed" in caplog.text


def test_history_leaves_damaged_checkpoints_and_continues_after_an_interruption(tmp_path, caplog):
    save_steps(tmp_path, [1] * 4, base=None)
    damage_state(tmp_path, 2)
    save_steps(tmp_path, [1], base=None, keep_last=1, keep_history=True)
    found = sorted(point.name for point in list_checkpoints(tmp_path))
    assert found == [
        "step-00000001-history",
        "step-00000002",
        "step-00000003-history",
        "step-00000004-history",
        "step-00000005",
    ]
    assert "step-00000002: unusable checkpoint left as it is" in caplog.text
    # As if killed after the history of step 5 was written.
    shutil.copytree(tmp_path / "step-00000005", tmp_path / "copy")
    save_steps(tmp_path, [1], base=None, keep_last=1, keep_history=True)
    (tmp_path / "copy").rename(tmp_path / "step-00000005")
    save_steps(tmp_path, [1], base=None, keep_last=1, keep_history=True)
    assert not (tmp_path / "step-00000005").exists()


def test_history_is_complete_if_its_base_is_damaged(tmp_path):
    save_steps(tmp_path, [1] * 3, base=None, keep_last=1, keep_history=True)
    (tmp_path / "step-00000001-history" / "state.safetensors").write_bytes(b"")
    save_steps(tmp_path, [1], base=None, keep_last=1, keep_history=True)
    assert read_manifest(tmp_path / "step-00000002-history").base.name == "step-00000001-history"
    assert read_manifest(tmp_path / "step-00000003-history").base is None


def test_retention_removes_only_checkpoints_of_the_loop(tmp_path):
    save_steps(tmp_path, [1] * 3, base=None)
    shutil.copytree(tmp_path / "step-00000002", tmp_path / "favorite")
    state = load_checkpoint(tmp_path / "step-00000002")
    save_checkpoint(state, tmp_path / "mine", base=tmp_path / "step-00000001")
    (tmp_path / "latest").symlink_to("step-00000003")
    save_steps(tmp_path, [1] * 2, base=None, keep_last=1)
    found = {point.name for point in list_checkpoints(tmp_path)}
    assert found == {"favorite", "mine", "step-00000001", "step-00000005"}
    assert (tmp_path / "latest").is_symlink()
    load_checkpoint(tmp_path / "mine")


def test_a_step_whose_folder_was_removed_is_saved_again(tmp_path):
    with start(tmp_path) as ckpt:
        shutil.rmtree(ckpt.step().path)
        assert ckpt.save().path.is_dir()


def test_a_manifest_that_cannot_be_opened_is_reported_and_stays(tmp_path):
    save_steps(tmp_path, [1] * 3, base=None)
    manifest = tmp_path / "step-00000002" / "checkpoint.json"
    manifest.unlink()
    manifest.symlink_to(manifest)
    reason = f"{manifest}: too many levels of symbolic links"
    assert find_unreadable(tmp_path) == {"step-00000002": reason}
    assert verify_run(tmp_path).damaged == {"step-00000002": reason}
    steps, first = save_steps(tmp_path, [1], base=None, keep_last=1)
    assert (steps, first) == ([4], 3)
    assert (tmp_path / "step-00000002" / "state.safetensors").is_file()


@contextlib.contextmanager
def without_privileges():
    """Give up the rights of root, which ignores the modes of folders."""
    user = os.geteuid()
    os.seteuid(user or 65534)
    try:
        yield
    finally:
        os.seteuid(user)


def test_a_folder_without_permission_does_not_prevent_saves(tmp_path):
    save_steps(tmp_path, [1, 1], keep_last=1)
    with tempfile.TemporaryDirectory() as name:
        run = Path(name)
        run.chmod(0o777)
        (run / "lost+found").mkdir(mode=0)  # in the root folder of a file system
        with without_privileges():
            assert save_steps(run, [1] * 3, keep_last=1, base=None) == ([3], 0)
            assert save_steps(run, [1], keep_last=1, base=None) == ([4], 3)
            assert is_run(run)


def test_a_link_is_not_removed_as_a_checkpoint(tmp_path):
    save_steps(tmp_path, [1])
    (tmp_path / "latest").symlink_to("step-00000001")
    with pytest.raises(ConfigError, match="is a link"):
        remove_checkpoint(tmp_path / "latest")
    assert loads(tmp_path, 1)


def test_resume_raises_if_every_checkpoint_is_unreadable(tmp_path):
    save_steps(tmp_path, [1])
    (tmp_path / "step-00000001" / "checkpoint.json").write_bytes(b"")
    with pytest.raises(FormatError, match="none of the 1 checkpoints can be read"), start(tmp_path):
        pass
    (tmp_path / "step-00000001").rename(tmp_path / "damaged-step-00000001")
    with start(tmp_path) as ckpt:
        assert ckpt.start == 0


SCALARS = {
    "tensor": torch.tensor,
    "one item": lambda x: torch.tensor([x]),
    "bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "requires_grad": lambda x: torch.tensor(x, requires_grad=True),
    "float32": np.float32,
    "array": np.array,
    "int": lambda x: int(4 * x),
}


@pytest.mark.parametrize("kind", SCALARS)
def test_keep_best_takes_scalars_of_any_type(tmp_path, kind):
    losses = [SCALARS[kind](x) for x in (1.0, 0.5, 2.0, 3.0)]
    steps, _ = save_steps(tmp_path, losses, keep_best="loss", base=None)
    assert steps == [2, 4]
    assert all(type(p.manifest.metrics["loss"]) is float for p in list_checkpoints(tmp_path))


def test_metrics_that_version_1_left_out_of_the_manifest_count(tmp_path):
    model = nn.Linear(16, 16)
    for step, loss in ((1, 1.0), (2, 0.5), (3, 2.0)):
        folder = tmp_path / f"step-{step:08d}"
        metrics = {"loss": torch.tensor(loss), "other": "x"}
        save_checkpoint({"model": model.state_dict(), "metrics": metrics, "step": step}, folder)
        unseal_manifest(folder, metrics={})
    options = {"every": 1, "keep_best": "loss", "async_": False, "base": None}
    with checkpointing(tmp_path, model, **options) as ckpt:
        ckpt.step(loss=3.0)
    assert list_steps(tmp_path) == [2, 4]


def test_nan_never_counts_as_best(tmp_path):
    nan = float("nan")
    steps, _ = save_steps(tmp_path / "a", [nan, 2.0, 1.0, nan, 3.0], keep_best="loss", base=None)
    assert steps == [3, 5]
    steps, _ = save_steps(tmp_path / "b", [nan, nan, nan], keep_best="loss", base=None)
    assert steps == [3]
    options = {"keep_best": "loss", "best_is": "max", "base": None}
    save_steps(tmp_path / "c", [nan, 2.0], **options)
    steps, _ = save_steps(tmp_path / "c", [1.0, nan], **options)
    assert steps == [2, 4]


@pytest.mark.parametrize(
    "value",
    [
        torch.ones(2),
        torch.tensor(1j),
        torch.empty((), device="meta"),
        np.ones(3),
        np.complex64(1),
        1j,
        "0.5",
        None,
        [1.0],
        10**400,
    ],
)
def test_other_metrics_are_refused_by_name_at_every_step(tmp_path, value):
    with start(tmp_path, every=100) as ckpt:
        with pytest.raises(ConfigError, match="metric 'accuracy' must be a number"):
            ckpt.step(accuracy=value)
        with pytest.raises(ConfigError, match="metric 'accuracy' must be a number"):
            ckpt.save(accuracy=value)


def test_an_unknown_metric_of_keep_best_is_reported_at_the_first_save(tmp_path, caplog):
    with caplog.at_level(logging.WARNING), start(tmp_path, keep_best="acuracy") as ckpt:
        ckpt.step(accuracy=1, loss=2)
        ckpt.step(accuracy=1, loss=2)
    expected = "no metric named 'acuracy' so far; known metrics: accuracy, loss"
    assert caplog.text.count(expected) == 1
    caplog.clear()
    with start(tmp_path, keep_best="accuracy") as ckpt:
        ckpt.step()  # known from the checkpoints on disk
    assert "no metric named" not in caplog.text


@pytest.mark.parametrize("async_", [True, False])
def test_a_second_save_of_a_step_writes_nothing(tmp_path, async_):
    with start(tmp_path, async_=async_) as ckpt:
        ckpt.step(loss=1)
        ckpt.wait()
        before = (tmp_path / "step-00000001" / "checkpoint.json").stat()
        saved = ckpt.save()
        assert saved.path == tmp_path / "step-00000001"
        assert ckpt.save(loss=1).path == saved.path
        after = (tmp_path / "step-00000001" / "checkpoint.json").stat()
        assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    with start(tmp_path, async_=async_) as ckpt:
        assert ckpt.save().path == saved.path
        assert ckpt.save().summary.stored_bytes == saved.summary.stored_bytes
        ckpt.step()
    assert list_steps(tmp_path) == [1, 2]


@pytest.mark.parametrize("base", ["chain", None])
def test_a_second_save_of_a_step_with_new_metrics_replaces_the_first(tmp_path, base):
    with start(tmp_path, base=base, keep_best="accuracy") as ckpt:
        ckpt.step(loss=1, accuracy=0.5)
        change_weights(ckpt)
        first = ckpt.step(loss=2)
        second = ckpt.save(accuracy=0.25, epoch=3)
        assert second.path == first.path
        assert second.manifest.base == first.manifest.base
        change_weights(ckpt)
        ckpt.step(accuracy=1)
    found = {p.manifest.step: p.manifest for p in list_checkpoints(tmp_path)}
    assert found[2].metrics == {"loss": 2.0, "accuracy": 0.25}
    assert found[2].epoch == 3
    assert loads(tmp_path, 3)


def damage_at_random(random, path):
    """Damage a file of a checkpoint in one of several ways."""
    file = path / random.choice(["checkpoint.json", "state.safetensors"])
    raw = bytearray(file.read_bytes())
    match random.randrange(4):
        case 0:
            file.unlink()
        case 1:
            file.write_bytes(raw[: random.randrange(len(raw))])
        case _:
            raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
            file.write_bytes(raw)


def find_loadable(folder):
    """Return the names of the resumable checkpoints that load, by step."""
    found = {}
    for path in sorted(folder.glob("step-*")):
        with contextlib.suppress(FormatError, MismatchError):
            state = load_checkpoint(path)
            if read_manifest(path).profile != "history":
                found[state["step"]] = path.name
    return found


def read_all(folder):
    """Return the content of all files of a run."""
    return {path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("seed", range(6))
def test_runs_survive_damage_at_random(tmp_path, seed):
    random = Random(seed)
    with start(tmp_path, base="auto") as ckpt:
        for _ in range(3):
            change_weights(ckpt)
            ckpt.step(loss=random.random())
    for _ in range(5):
        names = list(find_loadable(tmp_path).values())
        for name in random.sample(names, min(random.randrange(3), len(names))):
            damage_at_random(random, tmp_path / name)
        intact = find_loadable(tmp_path)
        if not intact:
            with pytest.raises(FormatError, match="none of the"), start(tmp_path):
                pass
            return
        newest = tmp_path / intact[max(intact)]
        damaged = [p for p in tmp_path.glob("*step-*") if p.name > newest.name]
        content = set().union(*map(read_all, damaged))
        options = {
            "base": random.choice(["auto", "chain", None]),
            "keep_last": random.randrange(1, 3),
            "keep_best": random.choice([None, "loss"]),
            "keep_history": random.random() < 0.3,
        }
        count = random.randrange(1, 3)
        _, first = save_steps(tmp_path, [random.random() for _ in range(count)], **options)
        assert first == max(intact)
        assert max(find_loadable(tmp_path)) == first + count
        assert content <= read_all(tmp_path)  # what resume found damaged was not removed


def test_named_checkpoints_count_towards_the_last(tmp_path):
    for step in range(1, 7):
        save_checkpoint({"step": step, "x": torch.ones(4)}, tmp_path / f"step-{step}")
    points = list_checkpoints(tmp_path)

    def kept(last, *names):
        return sorted(Retention(last, names=frozenset(names)).select(points))

    assert kept(3, "step-2") == ["step-2", "step-5", "step-6"]
    assert kept(3, "step-5") == ["step-4", "step-5", "step-6"]
    assert kept(1, "step-2") == ["step-2", "step-6"]
    assert kept(1, "step-6") == ["step-6"]
    assert kept(2, "gone") == ["step-5", "step-6"]


@pytest.mark.crash
@pytest.mark.parametrize("calls", range(1, 8))
def test_an_interruption_while_checkpoints_are_set_aside_loses_nothing(
    tmp_path, monkeypatch, calls
):
    states = {}
    for step in (1, 2, 3, 4):
        states[step] = {"step": step, "x": torch.arange(64.0) + step}
        base = tmp_path / f"step-{step - 1}" if step in (2, 3, 4) else None
        save_checkpoint(states[step], tmp_path / f"step-{step}", base=base)
    done = []

    def fail_after(function):
        def call(*arguments, **options):
            done.append(function)
            if len(done) == calls:
                raise OSError("interrupted")
            return function(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail_after(Path.rename))
        patch.setattr(Path, "hardlink_to", fail_after(Path.hardlink_to))
        with contextlib.suppress(OSError):
            LoopFolder(tmp_path, "step-{}").set_newer_aside(1, saving=2)
    LoopFolder(tmp_path, "step-{}").set_newer_aside(1, saving=2)
    assert [point.name for point in list_checkpoints(tmp_path)] == ["step-1"]
    found = {}
    for folder in [tmp_path, *tmp_path.glob("earlier-run-*")]:
        for point in list_checkpoints(folder):
            state = load_checkpoint(point.path)
            assert torch.equal(state["x"], states[state["step"]]["x"])
            found[state["step"]] = point.path
    assert sorted(found) == [1, 2, 3, 4]
