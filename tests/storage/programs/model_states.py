"""An old and a new model, and the replacement of one by the other."""

import json
import sys
from pathlib import Path

import torch
from strategies import bits, same_bits

import slimtensors

torch.set_num_threads(1)  # a process without threads can be forked

# The shard size of the old model and of the new one, by kind of replacement.
SHARD_SIZES = {
    "file": (None, None),
    "single to shards": (None, 60_000),
    "shards to single": (60_000, None),
    "shards to shards": (90_000, 60_000),
}


def make_state(seed, items=40_000):
    """Return tensors of different densities."""
    return {
        f"t{i}": bits(seed + i, items, torch.float32, density)
        for i, density in enumerate((0.3, 1.0, 0.0))
    }


OLD, NEW = make_state(0), make_state(100)


def save_old(path, kind):
    """Save the old model."""
    if kind != "file":
        path.mkdir(exist_ok=True)
    slimtensors.save(OLD, path, max_shard_size=SHARD_SIZES[kind][0], threads=1)


def save_new(path, kind, **options):
    """Replace the old model by the new one."""
    slimtensors.save(NEW, path, max_shard_size=SHARD_SIZES[kind][1], threads=1, **options)


def identify(path):
    """Return "old" or "new" for a complete model, else "broken"."""
    loaded = slimtensors.load(path, threads=1)
    for label, state in (("old", OLD), ("new", NEW)):
        if loaded.keys() == state.keys() and all(same_bits(loaded[k], x) for k, x in state.items()):
            return label
    return "broken"


def get_folder(path):
    """Return the folder that contains the files of a model."""
    return path if path.is_dir() else path.parent


def list_files(path):
    return sorted(file.name for file in get_folder(path).iterdir())


def check_each_kind(check):
    """Call `check(path, kind)` in a subfolder of the first argument; print the results as JSON."""
    results = []
    for kind in SHARD_SIZES:
        folder = Path(sys.argv[1]) / kind.replace(" ", "-")
        folder.mkdir()
        try:
            results.append((kind, check(folder / "model", kind)))
        except BaseException:
            print(kind, file=sys.stderr)
            raise
    print(json.dumps(results))
