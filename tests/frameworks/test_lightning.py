"""Lightning's own options with SlimCheckpointIO plugged in, compared with Lightning alone."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from strategies import same_bits
from torch import nn

pytest.importorskip("lightning")
from frameworks.lightning_runs import (
    Model,
    equal_weights,
    list_names,
    make_model,
    make_trainer,
    weights_of,
)
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from lightning.pytorch.tuner import Tuner

from slimtensors.checkpoint import verify_run
from slimtensors.integrations.lightning import SlimCheckpointIO
from slimtensors.storage import temporary_name

TESTS = Path(__file__).parents[1]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


KEPT = {
    "the best": {"monitor": "score", "save_top_k": 1},
    "the best by maximum": {"monitor": "score", "mode": "max", "save_top_k": 2},
    "all": {"save_top_k": -1},
    "the last only": {"save_top_k": 0, "save_last": True},
    "the best and a copy of the last": {"monitor": "score", "save_top_k": 2, "save_last": True},
    "the best and a link": {"monitor": "score", "save_top_k": 1, "save_last": "link"},
    "the newest and a link": {"save_last": "link"},
    "steps and a link": {"every_n_train_steps": 3, "save_last": "link"},
    "every second epoch": {"every_n_epochs": 2, "save_top_k": -1},
    "by time": {"train_time_interval": timedelta(0), "save_top_k": -1},
    "one name": {"filename": "a", "monitor": "score", "enable_version_counter": False},
    "versions of one name": {"filename": "a", "monitor": "score", "save_top_k": 3},
    "folders": {"filename": "{epoch}/a", "save_top_k": -1, "auto_insert_metric_name": False},
}


@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT.keys())
def test_names_best_path_and_resumed_weights_are_those_of_lightning(tmp_path, options):
    found = []
    for native in (True, False):
        root = tmp_path / str(native)
        keep = ModelCheckpoint(root / "run", **options)
        model = make_model()
        make_trainer(root, native=native, callbacks=[keep]).fit(model)
        saved = sorted((root / "run").rglob("*.ckpt"))
        names = [str(path.relative_to(root)) for path in saved]
        links = [path.readlink() for path in saved if path.is_symlink()]
        paths = [p.removeprefix(str(root)) for p in (keep.best_model_path, keep.last_model_path)]
        resumed = make_model()
        source = keep.best_model_path or keep.last_model_path
        make_trainer(root, native=native, epochs=7).fit(resumed, ckpt_path=source)
        found.append((names, links, paths, weights_of(model), weights_of(resumed)))
    native, ours = found
    assert ours[:3] == native[:3]
    assert equal_weights(ours[3], native[3])
    assert equal_weights(ours[4], native[4])
    assert verify_run(tmp_path / "False" / "run")


def test_weights_alone_are_saved_and_cannot_be_resumed(tmp_path):
    messages = []
    for native in (True, False):
        keep = ModelCheckpoint(tmp_path / str(native), save_weights_only=True, save_last=True)
        model = make_model()
        trainer = make_trainer(tmp_path, native=native, epochs=2, callbacks=[keep])
        trainer.fit(model)
        stored = trainer.strategy.load_checkpoint(keep.best_model_path)
        assert "optimizer_states" not in stored
        assert equal_weights(stored["state_dict"], weights_of(model))
        with pytest.raises(KeyError) as error:
            make_trainer(tmp_path, native=native).fit(Model(), ckpt_path=keep.best_model_path)
        messages.append(str(error.value))
    assert messages[0] == messages[1]


def test_the_best_and_the_last_checkpoint_are_tested(tmp_path):
    results = []
    for native in (True, False):
        keep = ModelCheckpoint(tmp_path / str(native), monitor="score", save_last=True)
        stop = EarlyStopping("score", patience=1)
        model = make_model()
        trainer = make_trainer(tmp_path, native=native, callbacks=[keep, stop])
        trainer.fit(model)
        best = trainer.test(model, ckpt_path="best", verbose=False)
        last = trainer.validate(model, ckpt_path="last", verbose=False)
        results.append((trainer.current_epoch, stop.state_dict(), best, last))
    assert results[0] == results[1]


@pytest.mark.parametrize("average", ["swa", "ema"])
def test_averages_resume_bit_for_bit(tmp_path, average):
    def run(folder, *, native, epochs, resume=None):
        make = {"swa": lambda: StochasticWeightAveraging(1e-3, 2), "ema": EMAWeightAveraging}
        keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)
        model = make_model()
        callbacks = [make[average](), keep]
        trainer = make_trainer(tmp_path, native=native, epochs=epochs, callbacks=callbacks)
        trainer.fit(model, ckpt_path=resume)
        return weights_of(model)

    expected = run(tmp_path / "native", native=True, epochs=6)
    run(tmp_path / "ours", native=False, epochs=4)
    source = tmp_path / "ours" / "epoch=3.ckpt"
    found = run(tmp_path / "resumed", native=False, epochs=6, resume=source)
    assert equal_weights(found, expected)


def test_a_link_is_removed_and_never_followed(tmp_path):
    plugin = SlimCheckpointIO()
    for step in range(2):
        state = {"state_dict": {"w": torch.randn(64, 64)}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / f"{step}.ckpt")
    for name in ("0", "1", "missing"):
        (tmp_path / "last.ckpt").symlink_to(f"{name}.ckpt")
        plugin.remove_checkpoint(tmp_path / "last.ckpt")
        assert list_names(tmp_path) == ["0.ckpt", "1.ckpt"]
    (tmp_path / "last.ckpt").symlink_to("0.ckpt")
    plugin.remove_checkpoint(tmp_path / "0.ckpt")
    assert list_names(tmp_path) == ["1.ckpt", "last.ckpt"]
    assert plugin.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1


def test_a_checkpoint_is_loaded_through_a_link_elsewhere(tmp_path):
    plugin = SlimCheckpointIO()
    weight = torch.randn(64, 64)
    for step in range(2):
        state = {"state_dict": {"w": weight}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / "run" / f"{step}.ckpt")
    (tmp_path / "link").symlink_to(tmp_path / "run" / "1.ckpt")
    assert same_bits(plugin.load_checkpoint(tmp_path / "link")["state_dict"]["w"], weight)


def test_hidden_checkpoints_are_complete_and_removed(tmp_path):
    plugin = SlimCheckpointIO()
    state = {"state_dict": {"w": torch.randn(64, 64)}, "global_step": 1}
    plugin.save_checkpoint(state, tmp_path / "1.ckpt")
    plugin.save_checkpoint(state, tmp_path / ".temp.ckpt")
    plugin.remove_checkpoint(tmp_path / "1.ckpt")
    back = plugin.load_checkpoint(tmp_path / ".temp.ckpt")["state_dict"]["w"]
    assert same_bits(back, state["state_dict"]["w"])
    plugin.remove_checkpoint(tmp_path / ".temp.ckpt")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "strategy",
    ["ddp_fork", *(pytest.param(s, marks=pytest.mark.long) for s in ("ddp_spawn", "ddp_notebook"))],
)
def test_processes_leave_what_lightning_leaves(tmp_path, strategy):
    found = json.loads(run_program("lightning_processes", strategy, tmp_path))
    assert found["ours"] == found["native"]
    assert found["ours"]["left"] == []
    assert found["ranks"] == ["rank-0"]
    assert found["same weights"]


def run_program(name, *args):
    command = [sys.executable, Path(__file__).parent / "programs" / f"{name}.py", *map(str, args)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


@pytest.mark.long
def test_pytorch_lightning_takes_the_plugin(tmp_path):
    pytest.importorskip("pytorch_lightning")
    found = json.loads(run_program("pytorch_lightning_alone", tmp_path))
    assert found == {"lightning imported": False, "folder": True, "step": 4, "same weights": True}


def test_both_packages_take_the_plugin(tmp_path):
    package = pytest.importorskip("pytorch_lightning")
    plugin = SlimCheckpointIO()
    assert package.Trainer(plugins=[plugin], logger=False).strategy.checkpoint_io is plugin
    assert make_trainer(tmp_path, plugin=plugin).strategy.checkpoint_io is plugin


def test_fabric_saves_and_loads(tmp_path):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", plugins=[SlimCheckpointIO()])

    def make():
        model = nn.Linear(4, 4)
        return fabric.setup(model, torch.optim.AdamW(model.parameters()))

    (model, optimizer), (other, other_optimizer) = make(), make()
    fabric.backward(model(torch.ones(2, 4)).sum())
    optimizer.step()
    path = tmp_path / "a.ckpt"
    fabric.save(path, {"model": model, "optimizer": optimizer, "epoch": 3})
    rest = fabric.load(path, {"model": other, "optimizer": other_optimizer})
    assert rest == {"epoch": 3}
    assert equal_weights(other.state_dict(), model.state_dict())
    state = other_optimizer.state_dict()["state"][0]
    assert same_bits(state["exp_avg"], optimizer.state_dict()["state"][0]["exp_avg"])


@pytest.mark.parametrize("save_last", [None, True])
def test_asynchronous_saves_keep_the_same_checkpoints(tmp_path, save_last):
    found = []
    for plugin in (TorchCheckpointIO(), AsyncCheckpointIO(SlimCheckpointIO(base="chain"))):
        root = tmp_path / type(plugin).__name__
        keep = ModelCheckpoint(root / "run", monitor="score", save_top_k=1, save_last=save_last)
        model = make_model()
        trainer = make_trainer(root, plugin=plugin, callbacks=[keep, Wait()])
        trainer.fit(model)
        resumed = make_model()
        make_trainer(root, epochs=7).fit(resumed, ckpt_path=keep.best_model_path)
        found.append((list_names(root / "run"), weights_of(resumed)))
    assert found[0][0] == found[1][0]
    assert equal_weights(found[0][1], found[1][1])
    assert verify_run(root / "run")


class Wait(Callback):
    """Waits for the executor between epochs: Lightning's removals do not wait for its saves."""

    def on_train_epoch_start(self, trainer, module):
        if isinstance(trainer.strategy.checkpoint_io, AsyncCheckpointIO):
            trainer.strategy.checkpoint_io.teardown()


def test_a_removal_during_a_save_does_not_break_the_new_checkpoint(tmp_path):
    plugin = AsyncCheckpointIO(SlimCheckpointIO())
    weight = torch.randn(2048, 2048)
    state = {"state_dict": {"w": weight}, "global_step": 0}
    plugin.save_checkpoint(state, tmp_path / "0.ckpt")
    plugin.teardown()
    plugin.save_checkpoint({**state, "global_step": 1}, tmp_path / "1.ckpt")
    while not list(tmp_path.glob(".1.ckpt.*")) and not (tmp_path / "1.ckpt").exists():
        time.sleep(0.001)
    plugin.remove_checkpoint(tmp_path / "0.ckpt")
    plugin.teardown()
    assert list_names(tmp_path) == ["1.ckpt"]
    assert verify_run(tmp_path)
    assert same_bits(plugin.load_checkpoint(tmp_path / "1.ckpt")["state_dict"]["w"], weight)


def test_two_programs_save_to_one_folder(tmp_path):
    weight = torch.randn(64, 64)

    def run(name):
        plugin = SlimCheckpointIO(base="chain")  # one per program
        for step in range(8):
            state = {"state_dict": {"w": weight + step}, "global_step": step}
            plugin.save_checkpoint(state, tmp_path / f"{name}-{step}.ckpt")
            if step:
                plugin.remove_checkpoint(tmp_path / f"{name}-{step - 1}.ckpt")

    with ThreadPoolExecutor(2) as programs:
        list(programs.map(run, "ab"))
    assert list_names(tmp_path) == ["a-7.ckpt", "b-7.ckpt"]
    assert verify_run(tmp_path)
    for name in list_names(tmp_path):
        back = SlimCheckpointIO().load_checkpoint(tmp_path / name)["state_dict"]["w"]
        assert same_bits(back, weight + 7)


def test_leftovers_of_a_killed_program_are_removed_by_the_next_save(tmp_path):
    plugin = SlimCheckpointIO()
    state = {"state_dict": {"w": torch.ones(4)}, "global_step": 1}
    leftover = temporary_name(tmp_path / "earlier.ckpt")
    plugin.save_checkpoint(state, leftover)
    plugin.save_checkpoint(state, tmp_path / "1.ckpt")
    assert [path.name for path in tmp_path.iterdir()] == ["1.ckpt"]


def test_the_tuner_leaves_nothing_behind(tmp_path):
    found = []
    for native in (True, False):
        root = tmp_path / str(native)
        root.mkdir()
        model = make_model()
        trainer = make_trainer(root, native=native)
        Tuner(trainer).scale_batch_size(model, max_trials=2, init_val=4)
        finder = Tuner(trainer).lr_find(model, num_training=20, attr_name="rate")
        trainer.fit(model)
        found.append((model.batch_size, finder.results, list_names(root), weights_of(model)))
        assert not [path for path in root.iterdir() if path.name.startswith(".")]
    native, ours = found
    assert ours[:3] == native[:3]
    assert equal_weights(ours[3], native[3])


def test_a_checkpoint_of_a_cluster_is_found_also_beside_leftovers(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, epochs=2)
    trainer.fit(make_model())
    created, make_folder = [], Path.mkdir
    monkeypatch.setattr(
        Path, "mkdir", lambda p, *a, **k: (created.append(p), make_folder(p, *a, **k))
    )
    for _ in range(2):
        trainer.save_checkpoint(trainer._checkpoint_connector.hpc_save_path(tmp_path))
    assert len(created) == 2
    for folder in created:
        make_folder(folder)  # as left by a killed process
    again = make_trainer(tmp_path, epochs=3)
    again.fit(make_model(), ckpt_path="hpc")
    assert again.ckpt_path == str(tmp_path / "hpc_ckpt_2.ckpt")
    assert again.global_step == 12


def test_an_exception_is_saved_and_resumed_once(tmp_path):
    class Fail(Callback):
        def on_train_batch_end(self, trainer, *args):
            if trainer.global_step == 6:
                raise RuntimeError("failed")

    found = []
    for native in (True, False):
        root = tmp_path / str(native)
        trainer = make_trainer(root, native=native, callbacks=[OnExceptionCheckpoint(root), Fail()])
        with pytest.raises(RuntimeError, match="failed"):
            trainer.fit(make_model())
        assert "on_exception.ckpt" in list_names(root)
        model = make_model()
        make_trainer(root, native=native, callbacks=[OnExceptionCheckpoint(root)]).fit(model)
        assert "on_exception.ckpt" not in list_names(root)
        found.append(weights_of(model))
    assert equal_weights(found[0], found[1])
