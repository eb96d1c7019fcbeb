"""SlimCheckpointIO in Lightning."""

import pytest
import torch
from strategies import same_bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from slimtensors.checkpoint import load_checkpoint, points, save_checkpoint, verify_run
from slimtensors.errors import ConfigError
from slimtensors.integrations.lightning import SlimCheckpointIO

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def fit(folder, *, epochs=6, resume=None, plugin=None, **options):
    from lightning.pytorch import LightningModule, Trainer, seed_everything
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Model(LightningModule):
        def __init__(self):
            super().__init__()
            self.save_hyperparameters({"rate": 1e-3})
            self.net = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))

        def training_step(self, batch, index):
            loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 2)]

    seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(32, 32), torch.randint(0, 4, (32,)))
    model = Model()
    keep = ModelCheckpoint(folder, filename="{epoch}", every_n_epochs=1, **options)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[keep],
        plugins=[plugin or SlimCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=8), ckpt_path=resume)
    return {name: x.clone() for name, x in model.state_dict().items()}


def names(folder):
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_a_resumed_run_is_bitwise_equal(tmp_path):
    whole = fit(tmp_path / "a", save_top_k=-1)
    fit(tmp_path / "b", epochs=3, save_top_k=-1)
    resumed = fit(tmp_path / "b", resume=tmp_path / "b" / "epoch=2.ckpt", save_top_k=-1)
    assert all(same_bits(x, resumed[name]) for name, x in whole.items())
    assert names(tmp_path / "b") == [f"epoch={i}.ckpt" for i in range(6)]
    assert any(point.manifest.base for point in points(tmp_path / "b"))
    assert points(tmp_path / "b")[-1].manifest.step == 24
    assert verify_run(tmp_path / "b")


def test_what_others_need_of_a_removed_checkpoint_stays(tmp_path):
    fit(tmp_path, save_top_k=1, save_last=True)
    found = {point.name: point.manifest for point in points(tmp_path)}
    bases = {about.base.name for about in found.values() if about.base}
    assert found.keys() == {"epoch=5.ckpt", "last.ckpt"} | bases
    assert verify_run(tmp_path)
    assert load_checkpoint(tmp_path / "last.ckpt")["global_step"] == 24


@pytest.mark.parametrize("base", ["auto", "chain"])
def test_a_base_is_removed_with_the_last_checkpoint_that_needs_it(tmp_path, monkeypatch, base):
    monkeypatch.setattr("slimtensors.checkpoint.run._MAX_DELTA_RATIO", 10.0)
    plugin = SlimCheckpointIO(base=base)
    weight = torch.randn(64, 64)
    for step in range(4):
        state = {"state_dict": {"w": weight + step}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / f"{step}.ckpt")
    bases = [p.manifest.base and p.manifest.base.name for p in points(tmp_path)]
    assert bases == [None, *(["0.ckpt"] * 3 if base == "auto" else ["0.ckpt", "1.ckpt", "2.ckpt"])]
    left = {"0", "1", "2", "3"}
    for step in (0, 2, 1):
        plugin.remove_checkpoint(tmp_path / f"{step}.ckpt")
        left -= {str(step)}
        assert {name for name in names(tmp_path) if name.endswith(".ckpt")} == {
            f"{name}.ckpt" for name in left
        }
        assert verify_run(tmp_path)
        for name in left:
            state = plugin.load_checkpoint(tmp_path / f"{name}.ckpt")
            assert same_bits(state["state_dict"]["w"], weight + int(name))
    assert len(names(tmp_path)) == (2 if base == "auto" else 4)
    plugin.remove_checkpoint(tmp_path / "3.ckpt")
    assert names(tmp_path) == []
    plugin.remove_checkpoint(tmp_path / "3.ckpt")  # already removed


def test_a_kept_base_takes_no_space_of_its_own(tmp_path):
    plugin = SlimCheckpointIO()
    state = {"state_dict": {"w": torch.randn(64, 64)}}
    for step in range(2):
        plugin.save_checkpoint({**state, "global_step": step}, tmp_path / f"{step}.ckpt")
    inode = (tmp_path / "0.ckpt" / "state.safetensors").stat().st_ino
    plugin.remove_checkpoint(tmp_path / "0.ckpt")
    [base] = [point for point in points(tmp_path) if point.name != "1.ckpt"]
    assert base.name == f"base-{base.manifest.id}"
    assert (base.path / "state.safetensors").stat().st_ino == inode


def test_a_base_that_a_damaged_checkpoint_mentions_stays(tmp_path):
    plugin = SlimCheckpointIO()
    state = {"state_dict": {"w": torch.randn(64, 64)}}
    for step in range(2):
        plugin.save_checkpoint({**state, "global_step": step}, tmp_path / f"{step}.ckpt")
    manifest = tmp_path / "1.ckpt" / "checkpoint.json"
    manifest.write_text(manifest.read_text().replace('"step": 1', '"step": 7'))
    plugin.remove_checkpoint(tmp_path / "0.ckpt")
    assert sorted(name[:5] for name in names(tmp_path)) == ["1.ckp", "base-"]
    plugin.remove_checkpoint(tmp_path / "1.ckpt")
    assert names(tmp_path) == []


def test_checkpoints_of_the_same_name_are_replaced(tmp_path):
    plugin = SlimCheckpointIO(base=None)
    for step in range(2):
        plugin.save_checkpoint({"global_step": step, "x": torch.ones(2)}, tmp_path / "last.ckpt")
    back = plugin.load_checkpoint(tmp_path / "last.ckpt", map_location="cpu")
    assert back["global_step"] == 1
    assert names(tmp_path) == ["last.ckpt"]


def test_a_folder_of_other_files_is_not_replaced(tmp_path):
    (tmp_path / "models").mkdir()
    save_checkpoint({"x": torch.ones(1)}, tmp_path / "models" / "kept")
    with pytest.raises(ConfigError, match="models is a folder of other files and is not replaced"):
        SlimCheckpointIO().save_checkpoint({"x": torch.ones(1)}, tmp_path / "models")
    assert load_checkpoint(tmp_path / "models" / "kept")["x"] == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base": "previous"}, "base must be 'auto', 'chain' or None"),
        ({"keyframe_every": 0}, "keyframe_every must be a positive integer"),
        ({"base": "chain", "keyframe_every": 1000}, "keyframe_every must be at most"),
        ({"profile": "history"}, "cannot resume from profile 'history'"),
        ({"profile": "lossy"}, "lossy"),
        ({"threads": 0}, "threads must be a positive integer"),
    ],
)
def test_invalid_options_are_refused_when_the_plugin_is_built(options, message):
    with pytest.raises(ConfigError, match=message):
        SlimCheckpointIO(**options)


def test_leftovers_and_links_do_not_prevent_a_replacement(tmp_path):
    plugin = SlimCheckpointIO()
    state = {"state_dict": {"w": torch.randn(64, 64)}}
    plugin.save_checkpoint({**state, "global_step": 0}, tmp_path / "0.ckpt")
    (tmp_path / "last.ckpt").symlink_to("0.ckpt")
    save_checkpoint(state, tmp_path / "last.ckpt.new")  # left by a killed process
    for step in (1, 2):
        plugin.save_checkpoint({**state, "global_step": step}, tmp_path / "last.ckpt")
        assert plugin.load_checkpoint(tmp_path / "last.ckpt")["global_step"] == step
    assert plugin.load_checkpoint(tmp_path / "0.ckpt")["global_step"] == 0


@pytest.mark.parametrize("base", ["auto", "chain"])
def test_deltas_of_a_replaced_checkpoint_stay_readable(tmp_path, monkeypatch, base):
    monkeypatch.setattr("slimtensors.checkpoint.run._MAX_DELTA_RATIO", 10.0)
    plugin = SlimCheckpointIO(base=base)
    weight = torch.randn(64, 64)
    for step, name in enumerate(("best", "1", "2", "last", "best")):
        state = {"state_dict": {"w": weight + step}, "global_step": step}
        plugin.save_checkpoint(state, tmp_path / f"{name}.ckpt")
    assert verify_run(tmp_path)
    for step, name in ((1, "1"), (2, "2"), (3, "last"), (4, "best")):
        state = load_checkpoint(tmp_path / f"{name}.ckpt")
        assert same_bits(state["state_dict"]["w"], weight + step)


def test_a_damaged_base_is_not_used(tmp_path, caplog):
    plugin = SlimCheckpointIO()
    state = {"state_dict": {"w": torch.randn(64, 64)}}
    plugin.save_checkpoint({**state, "global_step": 0}, tmp_path / "0.ckpt")
    (tmp_path / "0.ckpt" / "state.safetensors").write_bytes(b"")
    plugin.save_checkpoint({**state, "global_step": 1}, tmp_path / "1.ckpt")
    assert plugin.load_checkpoint(tmp_path / "1.ckpt")["global_step"] == 1
    assert "saved in full, because the base cannot be read" in caplog.text
