"""Links and pipes in untrusted folders: nothing is written, locked or removed through them."""

import os
import stat
from pathlib import Path

import pytest
import torch
from reliability_tools import sample

import slimtensors
from slimtensors.checkpoint import build_checkpoint, load_checkpoint, save_checkpoint
from slimtensors.checkpoint.run import repair_run
from slimtensors.errors import ConfigError, SlimError
from slimtensors.folder.compress import compress_folder
from slimtensors.folder.config_json import read_config
from slimtensors.layerwise.resume import WorkFolder
from slimtensors.recipe import Recipe
from slimtensors.storage import write_file_atomically
from slimtensors.storage.atomic import (
    TEMPORARY_SUFFIX,
    lock_folder,
    remove_leftovers,
    temporary_name,
)

pytestmark = pytest.mark.hostile


@pytest.fixture
def secret(tmp_path) -> Path:
    """A file of the user, outside of the folder that is attacked."""
    path = tmp_path / "secret"
    path.write_text("do not touch")
    return path


@pytest.fixture
def folder(tmp_path) -> Path:
    path = tmp_path / "folder"
    path.mkdir()
    return path


def make_model(folder: Path, shards: int = 1) -> Path:
    folder.mkdir(exist_ok=True)
    tensors = {f"x{i}": torch.full((100,), i) for i in range(shards)}
    slimtensors.save(tensors, folder, preset="dense", max_shard_size=800 if shards > 1 else None)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_lock_file_that_is_a_link_is_not_written(folder, secret, link):
    link(secret, folder / ".lock")
    if link is os.symlink:
        with pytest.raises(ConfigError, match=r"\.lock is not a regular file"), lock_folder(folder):
            pass
    else:
        with lock_folder(folder):
            pass
    assert secret.read_text() == "do not touch"


def test_a_lock_file_with_other_content_is_not_written(folder):
    (folder / ".lock").write_text("the lock file of another program")
    with lock_folder(folder):
        pass
    assert (folder / ".lock").read_text() == "the lock file of another program"


def test_repairing_a_downloaded_run_does_not_write_through_its_lock(folder, secret):
    save_checkpoint({"step": 1}, folder / "1")
    (folder / ".lock").symlink_to(secret)
    with pytest.raises(ConfigError, match="lock"):
        repair_run(folder)
    assert secret.read_text() == "do not touch"


def test_a_small_file_is_not_written_through_a_link(folder, secret):
    (folder / f".report.json{TEMPORARY_SUFFIX}").symlink_to(secret)  # its name in version 0.1
    (folder / "report.json").symlink_to(secret)
    write_file_atomically(folder / "report.json", b"{}")
    assert secret.read_text() == "do not touch"
    assert not (folder / "report.json").is_symlink()
    assert (folder / "report.json").read_bytes() == b"{}"


def test_leftovers_are_not_removed_through_links(folder, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").touch()
    temporary_name(folder / "x").symlink_to(precious)
    temporary_name(folder / "x").symlink_to(precious / "thesis")
    remove_leftovers(folder / "x")
    assert [path.name for path in precious.iterdir()] == ["thesis"]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("shards", [1, 3])
def test_a_work_folder_that_is_a_link_is_refused(tmp_path, shards):
    precious = tmp_path / "precious"
    (precious / "files").mkdir(parents=True)
    (precious / "files" / "thesis").touch()
    source = make_model(tmp_path / "model", shards)
    (tmp_path / ".small.slimtensors-work").symlink_to(precious)
    with pytest.raises(ConfigError, match="slimtensors-work"):
        compress_folder(source, tmp_path / "small")
    assert [path.name for path in precious.iterdir()] == ["files"]
    assert (precious / "files" / "thesis").exists()
    assert not (tmp_path / "small").exists()


def test_finished_layers_are_not_written_through_links(folder, secret):
    (folder / "00000.safetensors").symlink_to(secret)
    WorkFolder(folder, {}).store("layer", {"x": torch.ones(3)})
    assert secret.read_text() == "do not touch"
    assert torch.equal(WorkFolder(folder, {}).load("layer")["x"], torch.ones(3))


def test_a_work_folder_that_others_can_write_is_refused(tmp_path):
    source = make_model(tmp_path / "model")
    work = tmp_path / ".small.slimtensors-work"
    work.mkdir()
    work.chmod(0o777)
    with pytest.raises(ConfigError, match="slimtensors-work"):
        compress_folder(source, tmp_path / "small")


@pytest.mark.skipif(os.geteuid() != 0, reason="changing the owner needs root")
def test_a_work_folder_of_another_user_is_refused(tmp_path):
    source = make_model(tmp_path / "model")
    work = tmp_path / ".small.slimtensors-work"
    work.mkdir(mode=0o700)
    os.chown(work, 65534, 65534)
    with pytest.raises(ConfigError, match="slimtensors-work"):
        compress_folder(source, tmp_path / "small")


@pytest.mark.parametrize(
    "name", ["model.safetensors.index.json", "model-00002-of-00003.safetensors"]
)
def test_a_pipe_in_a_model_folder_is_refused_at_once(tmp_path, name):
    folder = make_model(tmp_path / "model", 3)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(SlimError, match=name if "index" not in name else "model"):
        slimtensors.load(folder)
    with pytest.raises(SlimError, match=f"{name} is a named pipe"):
        slimtensors.load(folder / name)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.mknod(path, stat.S_IFSOCK)])
def test_every_file_that_is_a_pipe_or_socket_is_refused_at_once(tmp_path, make):
    save_checkpoint(build_checkpoint(torch.nn.Linear(2, 2)), tmp_path / "a")
    for name in ("checkpoint.json", "state.safetensors"):
        (tmp_path / "a" / name).rename(tmp_path / "kept")
        make(tmp_path / "a" / name)
        with pytest.raises(SlimError, match=name):
            load_checkpoint(tmp_path / "a")
        (tmp_path / "a" / name).unlink()
        (tmp_path / "kept").rename(tmp_path / "a" / name)
    make(tmp_path / "recipe.yaml")
    with pytest.raises(SlimError, match=r"recipe\.yaml"):
        Recipe.load(tmp_path / "recipe.yaml")
    make(tmp_path / "x.safetensors")
    with pytest.raises(SlimError, match=r"x\.safetensors"):
        slimtensors.load(tmp_path / "x.safetensors")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="there is no /dev/zero")
def test_a_device_is_refused():
    with pytest.raises(SlimError, match="/dev/zero is a device"):
        slimtensors.load("/dev/zero")


def test_files_to_read_may_be_links(tmp_path):
    (tmp_path / "blobs").mkdir()
    folder = make_model(tmp_path / "model", 3)
    for path in list(folder.iterdir()):  # as in the cache of huggingface_hub
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(tmp_path / "blobs" / path.name)
    assert len(slimtensors.load(folder)) == 3
    assert read_config(folder) == {}
    slimtensors.save(sample(), tmp_path / "x.safetensors")
