"""Sharded models that contain one value each, and processes that write them in a loop."""

import json
import os
import signal

import torch
from safetensors.torch import save_file

import slimtensors
from slimtensors.storage.atomic import create_folder, write_file_atomically

torch.set_num_threads(1)  # a process without threads can be forked

COUNT = 6
INDEX = "model.safetensors.index.json"


def make_state(value):
    return {f"x{i}": torch.full((100,), value * 10 + i) for i in range(COUNT)}


def read_value(folder):
    """Load a model and return the digits of the values that it contains."""
    state = slimtensors.load(folder, threads=1)
    assert len(state) == COUNT, sorted(state)
    values = {int(number) // 10 for x in state.values() for number in (x[0], x[-1])}
    return "".join(map(str, sorted(values)))


def save(folder, value):
    slimtensors.save(make_state(value), folder, preset="dense", max_shard_size=1600, threads=1)


def save_plain(folder, value):
    """Write shards as other programs do, under other names than those of the last model."""
    old = {path.name for path in folder.glob("*.safetensors")}
    mark = "b" if any(name.startswith("a") for name in old) else "a"
    weight_map = {name: f"{mark}-{name}.safetensors" for name in make_state(value)}
    for name, x in make_state(value).items():
        save_file({name: x}, folder / weight_map[name])
    write_file_atomically(folder / INDEX, json.dumps({"weight_map": weight_map}).encode())
    for name in old:
        (folder / name).unlink()


def replace_with(write):
    """Return a function that writes a new folder and replaces the old one by it."""

    def replace(target, value):
        with create_folder(target, replace=True) as folder:
            write(folder, value)

    return replace


WRITERS = {
    "save": save,
    "save plain": save_plain,
    "replace": replace_with(save),
    "replace plain": replace_with(save_plain),
}


class Loop:
    """A process that calls `act(0)`, `act(1)`, … until it is stopped or `count` is reached."""

    def __init__(self, act, count=None):
        self._receiver, sender = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            self._run(act, count, sender)
        os.close(sender)

    def _run(self, act, count, sender):
        stopped = []
        signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
        done = 0
        try:
            while not stopped and done != count:
                act(done)
                done += 1
            os.write(sender, str(done).encode())
        finally:
            os._exit(0)

    def wait(self):
        """Return the number of calls; fail if one raised."""
        os.waitpid(self._pid, 0)
        return int(os.read(self._receiver, 20))

    def stop(self):
        os.kill(self._pid, signal.SIGTERM)
        return self.wait()
