"""Operations that replace something in a folder, and what the folder contains afterwards.

Each has `prepare(folder)`, `run(folder)` and `identify(folder)`, which returns "old" or "new" if
everything in the folder is complete and correct, and raises or returns something else if not.
"""

import json
import warnings

import torch
from strategies import bits, same_bits
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import slimtensors
from slimtensors.archive.delta import diff, restore
from slimtensors.checkpoint import (
    checkpointing,
    list_checkpoints,
    load_checkpoint,
    save_checkpoint,
)
from slimtensors.checkpoint.distributed import StorageReader, StorageWriter
from slimtensors.folder import compress_folder
from slimtensors.storage.atomic import create_folder, write_file_atomically

torch.set_num_threads(1)  # a process without threads can be forked
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def make_state(seed):
    """Return tensors of different densities."""
    densities = {"a": 0.3, "b": 1.0, "c": 0.0, "d": 0.5}
    return {
        f"{name}.weight": bits(seed + i, 2000, torch.float32, density).view(40, 50)
        for i, (name, density) in enumerate(densities.items())
    }


STATES = {"old": make_state(0), "new": make_state(100)}


def label(loaded):
    """Return which state this is."""
    for name, state in STATES.items():
        if loaded.keys() == state.keys() and all(same_bits(loaded[k], x) for k, x in state.items()):
            return name
    return "broken"


class Save:
    """Save a file over another, or a model into the folder of another."""

    def __init__(self, *sizes):
        self._sizes = dict(zip(STATES, sizes, strict=True)) if sizes else None

    def _save(self, folder, name):
        path, size = folder / "x.safetensors", None
        if self._sizes:
            path, size = folder / "model", self._sizes[name]
            path.mkdir(exist_ok=True)
        slimtensors.save(STATES[name], path, max_shard_size=size, threads=1)

    def prepare(self, folder):
        self._save(folder, "old")

    def run(self, folder):
        self._save(folder, "new")

    def identify(self, folder):
        path = folder / ("model" if self._sizes else "x.safetensors")
        return label(slimtensors.load(path, threads=1))


class Compress:
    """Replace a compressed folder by another one."""

    def prepare(self, folder):
        for name in STATES:
            source = folder / name
            slimtensors.save(STATES[name], source, preset="dense", max_shard_size=9000, threads=1)
            (source / "config.json").write_text(json.dumps({"name": name}))
        compress_folder(folder / "old", folder / "small", threads=1)

    def run(self, folder):
        compress_folder(folder / "new", folder / "small", replace=True, threads=1)

    def identify(self, folder):
        found = label(slimtensors.load(folder / "small", threads=1))
        config = json.loads((folder / "small" / "config.json").read_text())
        assert config["name"] == found, config
        return found


class SaveCheckpoint:
    """Save a checkpoint beside another one, as a delta of it or not."""

    def __init__(self, *, is_delta=False):
        self._is_delta = is_delta

    def prepare(self, folder):
        save_checkpoint({"model": STATES["old"], "step": 1}, folder / "run" / "1", threads=1)

    def run(self, folder):
        state, base = {"model": STATES["new"], "step": 2}, folder / "run" / "1"
        base = base if self._is_delta else None
        save_checkpoint(state, folder / "run" / "2", base=base, threads=1)

    def identify(self, folder):
        points = list_checkpoints(folder / "run")
        names = [label(load_checkpoint(point.path, threads=1)["model"]) for point in points]
        assert names == list(STATES)[: len(names)], names
        return names[-1]


class DistributedCheckpoint:
    """Replace a distributed checkpoint in a folder that also contains files of the user."""

    def __init__(self):
        self._others = {"config.json": "{}", "model.safetensors": "not ours", "notes/a": "text"}

    def _save(self, folder, name):
        writer = StorageWriter(folder / "all", threads=1)
        try:
            dcp.save(STATES[name], storage_writer=writer, no_dist=True)
        except CheckpointException as error:
            raise error.failures[0][0] from None

    def prepare(self, folder):
        for name, text in self._others.items():
            path = folder / "all" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._save(folder, "old")

    def run(self, folder):
        self._save(folder, "new")

    def identify(self, folder):
        for name, text in self._others.items():
            assert (folder / "all" / name).read_text() == text, name
        loaded = {name: torch.zeros_like(x) for name, x in STATES["old"].items()}
        dcp.load(loaded, storage_reader=StorageReader(folder / "all", threads=1), no_dist=True)
        return label(loaded)


class Retention:
    """Resume a run that keeps one checkpoint, and save the next, so that the old one is removed."""

    def _save(self, folder, step):
        model = torch.nn.Linear(40, 50)
        options = {"every": 1, "keep_last": 1, "async_": False, "threads": 1}
        with checkpointing(folder / "run", model, base=None, **options) as loop, torch.no_grad():
            if loop.start < step:
                model.weight.copy_(STATES[list(STATES)[step - 1]]["a.weight"].T)
                loop.step(step)

    def prepare(self, folder):
        self._save(folder, 1)

    def run(self, folder):
        self._save(folder, 2)

    def identify(self, folder):
        points = list_checkpoints(folder / "run")
        for point in points:
            expected = STATES[list(STATES)[point.manifest.step - 1]]["a.weight"].T
            state = load_checkpoint(point.path, threads=1)
            assert same_bits(state["model"]["weight"], expected), point.path
        return list(STATES)[points[-1].manifest.step - 1]


class ReplaceFolder:
    """Replace a folder of several files."""

    def _write(self, folder, name):
        with create_folder(folder / "model", replace=True) as new:
            (new / "sub").mkdir()
            (new / "copied.safetensors").write_text(name * 1000)
            (new / "sub" / "copied").write_text(name * 1000)
            write_file_atomically(new / "config.json", name.encode() * 1000)

    def prepare(self, folder):
        self._write(folder, "old")

    def run(self, folder):
        self._write(folder, "new")

    def identify(self, folder):
        files = [path for path in (folder / "model").rglob("*") if path.is_file()]
        assert len(files) == 3, files
        (text,) = {path.read_text() for path in files}
        assert len(text) == 3000, len(text)
        return text[:3]


class Delta:
    """Replace a delta by another one, of the same base."""

    def prepare(self, folder):
        slimtensors.save(make_state(50), folder / "base", preset="dense", threads=1)
        for name, state in STATES.items():
            slimtensors.save(state, folder / name, preset="dense", threads=1)
        diff(folder / "old", folder / "base", folder / "delta", threads=1)

    def run(self, folder):
        diff(folder / "new", folder / "base", folder / "delta", threads=1)

    def identify(self, folder):
        restored = folder.parent / "restored"
        restore(folder / "delta", folder / "base", restored, threads=1)
        return label(slimtensors.load(restored, threads=1))


SCENARIOS = {
    "file": Save(),
    "single to shards": Save(None, 9000),
    "shards to single": Save(9000, None),
    "shards to shards": Save(9000, 9000),
    "compress": Compress(),
    "checkpoint": SaveCheckpoint(),
    "delta checkpoint": SaveCheckpoint(is_delta=True),
    "distributed": DistributedCheckpoint(),
    "retention": Retention(),
    "folder": ReplaceFolder(),
    "delta": Delta(),
}
