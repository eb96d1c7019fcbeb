"""Atomic replacement of folders, temporary names, and leftovers of killed writers."""

import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from reliability_tools import leftovers, run_program

import slimtensors
from slimtensors.folder.compress import compress_folder
from slimtensors.storage import (
    atomic,
    remove_leftovers,
    replace_folder,
    temporary_folder,
    temporary_name,
)
from slimtensors.storage.atomic import (
    REPLACED_SUFFIX,
    TEMPORARY_SUFFIX,
    create_folder,
    create_temporary_file,
)

pytestmark = pytest.mark.crash

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.skipif(sys.platform != "linux", reason="other systems need two steps")
def test_a_process_killed_at_any_line_leaves_the_old_folder_or_the_new_one(tmp_path):
    found = run_program(PROGRAMS / "replace_folder.py", tmp_path / "x", "one step").splitlines()
    assert len(found) > 40
    assert set(found) == {"old", "new"}
    assert found == sorted(found, reverse=True)  # once new, it stays so


def test_replacing_in_two_steps_keeps_the_old_folder_under_a_hidden_name(tmp_path):
    found = run_program(PROGRAMS / "replace_folder.py", tmp_path / "x", "two steps").splitlines()
    assert set(found) == {"old", "old, hidden", "new"}


def test_a_folder_that_cannot_be_exchanged_is_replaced_in_two_steps(tmp_path, monkeypatch):
    monkeypatch.setattr("slimtensors.storage.atomic._exchange", lambda a, b: False)
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    replace_folder(tmp_path / "new", tmp_path / "old")
    assert [path.name for path in tmp_path.rglob("*")] == ["old", "new"]


def test_locked_leftovers_stay_and_others_are_removed(tmp_path):
    target = tmp_path / "x"
    with temporary_folder(target) as used:
        file, lock = create_temporary_file(target)
        left, other = temporary_name(target), temporary_name(tmp_path / "xy")
        left.mkdir()
        other.mkdir()
        remove_leftovers(target)
        assert {path.name for path in tmp_path.iterdir()} == {used.name, file.name, other.name}
        os.close(lock)
        remove_leftovers(target)
        assert {path.name for path in tmp_path.iterdir()} == {used.name, other.name}
    assert [path.name for path in tmp_path.iterdir()] == [other.name]


def test_leftovers_of_another_machine_stay(tmp_path, monkeypatch):
    left = temporary_name(tmp_path / "x")
    left.mkdir()
    monkeypatch.setattr("slimtensors.storage.atomic.machine_id", lambda: "01234567")
    with create_folder(tmp_path / "x", replace=False):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {"x", left.name}


@pytest.mark.parametrize("step", [1, 2])
def test_an_interrupt_between_two_steps_leaves_a_folder_under_the_name(tmp_path, monkeypatch, step):
    new, old = tmp_path / "new", tmp_path / "old"
    new.mkdir()
    old.mkdir()
    rename, count = Path.rename, []

    def rename_and_interrupt(self, target):
        rename(self, target)
        count.append(target)
        if len(count) == step:
            raise KeyboardInterrupt

    monkeypatch.setattr("slimtensors.storage.atomic._exchange", lambda a, b: False)
    monkeypatch.setattr(Path, "rename", rename_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        replace_folder(new, old)
    assert old.exists()


def test_losing_the_temporary_file_keeps_the_old_model(tmp_path):
    old = {f"x{i}": torch.randn(100) for i in range(4)}
    slimtensors.save(old, tmp_path / "model", max_shard_size=400)

    def remove(done):
        for name in leftovers(tmp_path / "model"):
            shutil.rmtree(tmp_path / "model" / name)

    with pytest.raises(FileNotFoundError):
        slimtensors.save({"x": torch.zeros(9)}, tmp_path / "model", progress=remove)
    assert slimtensors.load(tmp_path / "model").keys() == old.keys()


def test_a_replaced_folder_is_removed_only_once_its_name_exists_again(tmp_path):
    old = temporary_name(tmp_path / "x", REPLACED_SUFFIX)
    old.mkdir()
    remove_leftovers(tmp_path / "x")
    assert old.exists()
    with create_folder(tmp_path / "x", replace=False):
        pass
    with create_folder(tmp_path / "x", replace=True):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_compressing_a_folder_removes_its_leftovers(tmp_path):
    (tmp_path / "model").mkdir()
    slimtensors.save({"x": torch.zeros(99)}, tmp_path / "model")
    target = tmp_path / "small"
    for mark in (TEMPORARY_SUFFIX, REPLACED_SUFFIX):
        temporary_name(target, mark).mkdir()
    compress_folder(tmp_path / "model", target)
    assert [path.name[-4:] for path in tmp_path.glob(".small.*")] == ["-old"]
    compress_folder(tmp_path / "model", target, replace=True)
    assert {path.name for path in tmp_path.iterdir()} == {"model", "small"}


@pytest.mark.parametrize("name", ["x.safetensors", "folder/"])
def test_the_next_save_removes_the_leftovers_of_a_killed_one(tmp_path, name):
    target = tmp_path / name
    if name.endswith("/"):
        target.mkdir()
    run_program(PROGRAMS / "killed_save.py", target)
    assert len(leftovers(tmp_path)) == 1
    slimtensors.save({"y": torch.ones(9)}, tmp_path / "y.safetensors")
    assert len(leftovers(tmp_path)) == 1  # a leftover of another target
    slimtensors.save({"x": torch.ones(9)}, target)
    assert leftovers(tmp_path) == []


def test_concurrent_saves_do_not_remove_each_others_files(tmp_path):
    target, inner = tmp_path / "x.safetensors", []

    def save_too(done):
        if not inner:
            inner.append(leftovers(tmp_path))
            slimtensors.save({"x": torch.zeros(9)}, target)

    slimtensors.save({"x": torch.ones(9)}, target, progress=save_too)
    assert len(inner[0]) == 1
    assert torch.equal(slimtensors.load(target)["x"], torch.ones(9))
    assert leftovers(tmp_path) == []


def test_a_file_may_have_the_longest_name_there_is(tmp_path):
    slimtensors.save({"x": torch.ones(9)}, tmp_path / ("é" * 127))
    assert leftovers(tmp_path) == []


def test_without_locks_no_leftovers_are_removed(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError("locks are not supported")

    left = temporary_name(tmp_path / "x")
    left.touch()
    monkeypatch.setattr("fcntl.flock", fail)
    slimtensors.save({"x": torch.ones(9)}, tmp_path / "x")
    assert left.exists()


@pytest.mark.parametrize("is_there", [False, True])
def test_files_added_while_a_folder_is_merged_are_kept(tmp_path, monkeypatch, is_there):
    target = tmp_path / "x"
    if is_there:
        target.mkdir()
    sync_tree = atomic.sync_tree

    def add_files(folder):
        sync_tree(folder)
        (target / "notes").mkdir(parents=True, exist_ok=True)
        (target / "notes" / "text").write_text("added")
        (target / "new").write_text("old")

    monkeypatch.setattr(atomic, "sync_tree", add_files)
    with create_folder(target, merge=True) as folder:
        (folder / "new").write_text("new")
    assert (target / "notes" / "text").read_text() == "added"
    assert (target / "new").read_text() == "new"
    assert list(tmp_path.iterdir()) == [target]
