"""Distributed checkpoints: one file per rank, pieces of tensors (docs/format-distributed.md)."""

import json
import math
from functools import partial
from pathlib import Path

import numpy as np
from independent.reader.checkpoints import apply_entries
from independent.reader.container import open_archive
from independent.reader.crc32c import crc32c
from independent.reader.tensor import ITEM_BYTES, Tensor, check


def load(folder):
    """Return the nested state of a distributed checkpoint."""
    folder = Path(folder)
    about, tensors, objects = read_folder(folder)
    state = {}
    for table, values in ((about["tensors"], tensors), (about["objects"], objects)):
        for name, entry in table.items():
            put(state, entry["path"] or [name], values[name])
    return state


def put(state, path, value):
    """Store a value in nested dicts and lists; the integers of a path index lists."""
    *parents, last = path
    for key, following in zip(parents, path[1:], strict=True):
        empty = [] if isinstance(following, int) else {}
        if isinstance(state, list) and key == len(state):
            state.append(empty)
        state = state[key] if isinstance(state, list) else state.setdefault(key, empty)
    if isinstance(state, list):
        state.append(value)
    else:
        state[last] = value


def read_folder(folder):
    """Return `distributed.json`, whole tensors by name, and the other values by name."""
    text = (folder / "distributed.json").read_bytes()
    about = json.loads(text)
    check(about["format"] == "slimtensors distributed checkpoint", "format")
    check(about["version"] == 1, "version")
    check(crc32c(text.rpartition(b',\n"crc32c"')[0]) == about["crc32c"], "manifest checksum")
    before = {}
    if about["base"]:
        base, before, _ = read_folder(folder.parent / about["base"]["name"])
        check(base["run"] == about["base"]["run"], "another base")
    pieces, objects = [], []
    for name, size in about["files"].items():
        check((folder / name).stat().st_size == size, "wrong size")
        archive = open_archive(folder / name)
        state = archive.state(apply_entries(archive, partial(cut_base, archive, before)))
        check(state["run"] == about["run"], "a file of another save")
        pieces.append(state["tensors"])
        objects.append(state["objects"])
    tensors = {name: join(name, about, pieces) for name in about["tensors"]}
    return about, tensors, {n: objects[e["file"]][n] for n, e in about["objects"].items()}


def cut_base(archive, before, piece):
    """Return the part of the base's tensor that a piece corresponds to."""
    name, _, offsets = piece.removeprefix("tensors.").rpartition("@")
    start = [int(offset) for offset in offsets.split(",")] if offsets else []
    shape = archive.manifest["delta"]["checkpoint"][piece]["shape"]
    whole = before[name]
    part = as_items(whole)[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))]
    return Tensor(whole.dtype, tuple(shape), np.ascontiguousarray(part).tobytes())


def as_items(tensor):
    """Return the items of a tensor as an array of its shape."""
    return np.frombuffer(tensor.data, f"V{tensor.item_bytes}").reshape(tensor.shape)


def join(name, about, pieces):
    """Return a whole tensor from the pieces of its chunks."""
    entry = about["tensors"][name]
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    out = np.zeros(shape, f"V{ITEM_BYTES.get(dtype, 1)}")
    for offsets, sizes, file in entry["chunks"]:
        for start, rows in cut_chunk(offsets, sizes, out.itemsize, about["piece_bytes"]):
            piece = pieces[file][f"{name}@{','.join(map(str, start))}"]
            check((piece.dtype, piece.shape) == (dtype, rows), "wrong piece")
            where = tuple(slice(a, a + n) for a, n in zip(start, rows, strict=True))
            out[where] = as_items(piece)
    return Tensor(dtype, shape, out.tobytes())


def cut_chunk(offsets, sizes, item_bytes, piece_bytes):
    """Yield the offsets and sizes of the pieces of a chunk."""
    if not sizes or not math.prod(sizes):
        yield offsets, tuple(sizes)
        return
    rows = max(1, piece_bytes // (math.prod(sizes[1:]) * item_bytes))
    for first in range(0, sizes[0], rows):
        size = min(rows, sizes[0] - first)
        yield [offsets[0] + first, *offsets[1:]], (size, *sizes[1:])
