"""Where SlimCheckpointIO saves to and loads from: Lightning's files, URLs, devices, models."""

import argparse
import datetime
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from remote_store import s3_options, s3_server
from strategies import same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")
from frameworks.lightning_runs import (
    Model,
    equal_weights,
    list_names,
    make_model,
    make_trainer,
    weights_of,
)
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO

from slimtensors.errors import ConfigError, UnsupportedTensorError
from slimtensors.integrations.lightning import (
    SlimCheckpointIO,
    SlimCheckpointMixin,
    load_from_checkpoint,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Opens:
    """A pickle that creates a file when it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (self.path, "w")


def test_native_files_are_loaded_replaced_and_removed(tmp_path):
    expected = make_model()
    keep = ModelCheckpoint(tmp_path / "native", save_last=True)
    make_trainer(tmp_path, native=True, callbacks=[keep]).fit(expected)
    native = make_model()
    make_trainer(tmp_path, native=True, epochs=8).fit(native, ckpt_path=keep.last_model_path)
    ours = make_model()
    again = ModelCheckpoint(tmp_path / "native", save_last=True)
    trainer = make_trainer(tmp_path, epochs=8, callbacks=[again])
    trainer.fit(ours, ckpt_path=keep.last_model_path)
    assert equal_weights(weights_of(ours), weights_of(native))
    assert list_names(tmp_path / "native") == ["epoch=7-step=32.ckpt", "last.ckpt"]
    assert all((tmp_path / "native" / name).is_dir() for name in list_names(tmp_path / "native"))


@pytest.mark.parametrize("kind", ["file", "link", "dangling link"])
def test_a_file_or_link_is_replaced_in_one_step(tmp_path, kind):
    state = {"state_dict": {"w": torch.ones(4)}, "global_step": 1}
    plugin, path, other = SlimCheckpointIO(), tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    plugin.save_checkpoint(state, other)
    if kind == "file":
        torch.save(state, path)
    else:
        path.symlink_to("other.ckpt" if kind == "link" else "missing.ckpt")

    def is_always_there():
        while not saving.done():
            if not os.path.lexists(path):
                return False
        return True

    with ThreadPoolExecutor(1) as executor:
        saving = executor.submit(plugin.save_checkpoint, {**state, "global_step": 2}, path)
        assert is_always_there()
    assert plugin.load_checkpoint(path)["global_step"] == 2
    assert plugin.load_checkpoint(other)["global_step"] == 1
    assert sorted(tmp_path.iterdir()) == [path, other]


@pytest.mark.parametrize("weights_only", [None, True])
def test_no_more_is_unpickled_than_by_lightning(tmp_path, weights_only):
    torch.save({"state": Opens(str(tmp_path / "executed"))}, tmp_path / "bad.ckpt")
    for plugin in (TorchCheckpointIO(), SlimCheckpointIO()):
        with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
            plugin.load_checkpoint(tmp_path / "bad.ckpt", weights_only=weights_only)
    assert not (tmp_path / "executed").exists()


@pytest.fixture
def memory():
    """An empty file system in memory."""
    files = fsspec.filesystem("memory")
    files.store.clear()
    yield files
    files.store.clear()


def test_a_run_in_a_remote_folder_is_that_of_lightning(tmp_path, memory):
    found = []
    for native in (True, False):
        folder = f"memory://{native}"
        keep = ModelCheckpoint(folder, monitor="score", save_top_k=2, save_last=True)
        model = make_model()
        trainer = make_trainer(tmp_path, native=native, callbacks=[keep])
        trainer.fit(model)
        last = trainer.validate(model, ckpt_path="last", verbose=False)
        resumed = make_model()
        make_trainer(tmp_path, native=native, epochs=7).fit(resumed, ckpt_path=keep.best_model_path)
        names = [name.rpartition("/")[2] for name in memory.find(f"/{native}")]
        best = keep.best_model_path.removeprefix(folder)
        found.append((names, best, last, weights_of(resumed)))
    native, ours = found
    assert ours[:3] == native[:3]
    assert equal_weights(ours[3], native[3])


def test_a_remote_checkpoint_is_one_file_that_can_be_downloaded(tmp_path, memory):
    plugin = SlimCheckpointIO(profile="optimizer-bf16")
    weight = torch.randn(64, 64)
    moments = {"state": {0: {"exp_avg": weight / 3, "exp_avg_sq": weight.square()}}}
    state = {"state_dict": {"w": weight}, "optimizer_states": [moments], "global_step": 3}
    plugin.save_checkpoint(state, "memory://run/3.ckpt")
    memory.get_file("/run/3.ckpt", tmp_path / "3.ckpt")
    for path in ("memory://run/3.ckpt", tmp_path / "3.ckpt"):
        back = plugin.load_checkpoint(path)
        assert same_bits(back["state_dict"]["w"], weight)
        rounded = back["optimizer_states"][0]["state"][0]["exp_avg"]
        assert same_bits(rounded, rounded.bfloat16().float())
    plugin.remove_checkpoint("memory://run/3.ckpt")
    plugin.remove_checkpoint("memory://run/3.ckpt")  # already removed
    assert memory.find("/run") == []


@pytest.mark.long
def test_a_run_on_s3_is_saved_and_resumed(tmp_path, monkeypatch):
    with s3_server() as endpoint:
        monkeypatch.setitem(fsspec.config.conf, "s3", s3_options(endpoint))
        keep = ModelCheckpoint("s3://models/run", save_last=True)
        model = make_model()
        make_trainer(tmp_path, native=False, callbacks=[keep]).fit(model)
        back = SlimCheckpointIO().load_checkpoint("s3://models/run/last.ckpt")
        assert equal_weights(back["state_dict"], weights_of(model))
        resumed = make_model()
        trainer = make_trainer(tmp_path, native=False, epochs=7)
        trainer.fit(resumed, ckpt_path="s3://models/run/last.ckpt")
        assert trainer.current_epoch == 7


def test_a_truncated_remote_checkpoint_is_refused(memory):
    plugin = SlimCheckpointIO()
    plugin.save_checkpoint({"x": torch.randn(64, 64)}, "memory://run/a.ckpt")
    memory.pipe_file("/run/a.ckpt", memory.cat_file("/run/a.ckpt")[:-100])
    with pytest.raises(ValueError, match="truncated"):
        plugin.load_checkpoint("memory://run/a.ckpt")


def test_native_remote_files_are_loaded_and_removed(memory):
    TorchCheckpointIO().save_checkpoint({"x": torch.ones(3)}, "memory://run/a.ckpt")
    plugin = SlimCheckpointIO()
    assert same_bits(plugin.load_checkpoint("memory://run/a.ckpt")["x"], torch.ones(3))
    plugin.remove_checkpoint("memory://run/a.ckpt")
    assert memory.find("/run") == []


def test_a_file_url_is_a_local_path(tmp_path):
    plugin = SlimCheckpointIO()
    url = f"file://{tmp_path}/a.ckpt"
    plugin.save_checkpoint({"x": torch.ones(3)}, url)
    assert (tmp_path / "a.ckpt").is_dir()
    assert same_bits(plugin.load_checkpoint(url)["x"], torch.ones(3))
    plugin.remove_checkpoint(url)
    assert list_names(tmp_path) == []


def test_missing_checkpoints_and_remote_folders_are_refused(tmp_path, memory):
    for path in (tmp_path / "a.ckpt", "memory://a.ckpt"):
        for plugin in (TorchCheckpointIO(), SlimCheckpointIO()):
            with pytest.raises(FileNotFoundError, match="Checkpoint file not found"):
                plugin.load_checkpoint(path)
    memory.pipe_file("/run/checkpoint.json", b"{}")
    with pytest.raises(ConfigError, match="is a folder; copy it and its bases to a local folder"):
        SlimCheckpointIO().load_checkpoint("memory://run")


class Guarded(MemoryFileSystem):
    """A file system that requires an option."""

    protocol = "guarded"
    store: ClassVar = {}
    pseudo_dirs: ClassVar = [""]

    def __init__(self, *, token, **options):
        super().__init__(**options)


def test_storage_options_are_for_urls(tmp_path):
    fsspec.register_implementation("guarded", Guarded, clobber=True)
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit(make_model())
    with pytest.raises(TypeError, match="token"):
        trainer.save_checkpoint("guarded://a.ckpt")
    trainer.save_checkpoint("guarded://a.ckpt", storage_options={"token": "x"})
    plugin = SlimCheckpointIO(storage_options={"token": "x"})
    assert plugin.load_checkpoint("guarded://a.ckpt")["global_step"] == 4
    plugin.remove_checkpoint("guarded://a.ckpt")
    assert Guarded.store == {}
    text = "with `storage_options` arg is not supported for `SlimCheckpointIO`"
    for path, options in ((tmp_path / "a.ckpt", {}), ("guarded://b.ckpt", 3)):
        with pytest.raises(TypeError, match=text):
            trainer.save_checkpoint(path, storage_options=options)


LOCATIONS = {
    "none": None,
    "text": "meta",
    "device": torch.device("meta"),
    "dict": {"cpu": "meta"},
    "dict of others": {"cuda:0": "cpu"},
    "function": lambda storage, location: storage,
    "function without result": lambda storage, location: None,
    "function to a device": lambda storage, location: torch.UntypedStorage(
        storage.nbytes(), device="meta"
    ),
}


@pytest.mark.parametrize("map_location", LOCATIONS.values(), ids=LOCATIONS.keys())
def test_tensors_are_placed_as_by_torch_load(tmp_path, map_location):
    weight = torch.randn(4, 4)
    state = {"a": weight, "tied": weight, "deep": [{"b": torch.ones(2, 3).t()}], "n": 3}
    found = []
    for plugin in (TorchCheckpointIO(), SlimCheckpointIO()):
        path = tmp_path / type(plugin).__name__
        plugin.save_checkpoint(state, path)
        found.append(plugin.load_checkpoint(path, map_location=map_location))
    for native, ours in zip(*map(flat, found), strict=True):
        assert (ours.device, ours.shape, ours.stride()) == (
            native.device,
            native.shape,
            native.stride(),
        )
        assert native.is_meta or same_bits(ours, native)
    ours = found[1]
    assert ours["a"].untyped_storage()._cdata == ours["tied"].untyped_storage()._cdata


def flat(state):
    return [state["a"], state["tied"], state["deep"][0]["b"]]


def test_a_device_that_is_missing_is_refused_as_by_torch_load(tmp_path):
    messages = []
    for plugin in (TorchCheckpointIO(), SlimCheckpointIO()):
        path = tmp_path / type(plugin).__name__
        plugin.save_checkpoint({"a": torch.ones(1)}, path)
        with pytest.raises(RuntimeError) as error:
            plugin.load_checkpoint(path, map_location="cuda:0")
        messages.append(str(error.value))
    assert messages[0] == messages[1]


VALUES = {
    "path": Path("data") / "train",
    "when": datetime.datetime(2024, 5, 6, 7, 8, tzinfo=datetime.UTC),
    "day": datetime.date(2024, 5, 6),
    "pause": datetime.timedelta(minutes=3),
    "tags": {"a", "b"},
    "fixed": frozenset({1, 2}),
    "args": argparse.Namespace(depth=3, names=["a"]),
    "sizes": (1, 2),
    "scale": 1 + 2j,
}


@pytest.mark.parametrize("place", ["folder", "remote"])
def test_load_from_checkpoint_restores_weights_and_hyperparameters(tmp_path, memory, place):
    path = tmp_path / "a.ckpt" if place == "folder" else "memory://a.ckpt"
    model = make_model(width=24, **VALUES)
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit(model)
    trainer.save_checkpoint(path)
    loaded = load_from_checkpoint(Model, path)
    assert equal_weights(weights_of(loaded), weights_of(model))
    assert dict(loaded.hparams) == dict(model.hparams)
    assert {name: type(loaded.hparams[name]) for name in VALUES} == {
        name: type(value) for name, value in VALUES.items()
    }
    assert load_from_checkpoint(Model, path, rate=5.0).hparams.rate == 5.0
    assert next(load_from_checkpoint(Model, path, "cpu").parameters()).is_cpu
    with pytest.raises(pickle.UnpicklingError, match="PosixPath"):
        load_from_checkpoint(Model, path, weights_only=True)


def test_a_model_with_the_mixin_loads_checkpoints_of_both_kinds(tmp_path):
    class Mixed(SlimCheckpointMixin, Model):
        pass

    found = []
    for native in (True, False):
        model = make_model(width=24)
        trainer = make_trainer(tmp_path, native=native, epochs=1)
        trainer.fit(model)
        path = tmp_path / f"{native}.ckpt"
        trainer.save_checkpoint(path)
        loaded = Mixed.load_from_checkpoint(path, strict=True)
        assert type(loaded) is Mixed
        assert equal_weights(weights_of(loaded), weights_of(model))
        assert equal_weights(
            weights_of(Mixed.load_from_checkpoint(checkpoint_path=path)), weights_of(model)
        )
        found.append(weights_of(load_from_checkpoint(Mixed, checkpoint_path=str(path))))
        with path.open("rb") if native else pytest.raises(IsADirectoryError) as file:
            again = Mixed.load_from_checkpoint(file) if native else Model.load_from_checkpoint(path)
            assert equal_weights(weights_of(again), weights_of(model))
    assert equal_weights(*found)


def test_a_folder_named_like_a_url_is_local(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = {"state_dict": make_model().state_dict(), "pytorch-lightning_version": "2.6.0"}
    SlimCheckpointIO().save_checkpoint(state, "http-run/a.ckpt")
    loaded = load_from_checkpoint(Model, "http-run/a.ckpt")
    assert equal_weights(weights_of(loaded), state["state_dict"])


def test_load_from_checkpoint_of_an_object_is_refused_as_by_lightning(tmp_path):
    class Mixed(SlimCheckpointMixin, Model):
        pass

    SlimCheckpointIO().save_checkpoint({"state_dict": {}}, tmp_path / "a.ckpt")
    for kind in (Model, Mixed):
        with pytest.raises(TypeError, match="cannot be called on an instance"):
            kind().load_from_checkpoint(tmp_path / "a.ckpt")


class Configured(LightningModule):
    """A model with a config of OmegaConf."""

    def __init__(self, config):
        super().__init__()
        self.save_hyperparameters(config)
        self.layer = nn.Linear(8, config.layers.width)

    def training_step(self, batch, index):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Data(LightningDataModule):
    """Data with hyperparameters and a state."""

    def __init__(self, root, rows=8):
        super().__init__()
        self.save_hyperparameters()
        self.epochs = 0

    def train_dataloader(self):
        self.epochs += 1
        return DataLoader(TensorDataset(torch.ones(self.hparams.rows, 8)), batch_size=4)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state_dict):
        self.epochs = state_dict["epochs"]


def test_configs_of_omegaconf_and_data_modules_are_restored(tmp_path):
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create({"layers": {"width": 5}, "same": "${layers.width}"})
    model, data = Configured(config), Data(Path("root"))
    trainer = make_trainer(tmp_path, epochs=1)
    trainer.fit(model, data)
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = load_from_checkpoint(Configured, tmp_path / "a.ckpt")
    assert type(loaded.hparams) is omegaconf.DictConfig
    assert loaded.hparams == config
    assert loaded.hparams.same == 5
    assert equal_weights(weights_of(loaded), weights_of(model))
    back = load_from_checkpoint(Data, tmp_path / "a.ckpt")
    assert (back.hparams.root, back.hparams.rows, back.epochs) == (Path("root"), 8, 1)


def test_a_hyperparameter_that_needs_code_is_refused_by_its_name(tmp_path):
    trainer = make_trainer(tmp_path, epochs=1)
    with pytest.raises(UnsupportedTensorError, match=r"hyper_parameters\.activation"):
        trainer.fit(make_model(activation=nn.GELU()))
    assert not (tmp_path / "checkpoints").exists()
