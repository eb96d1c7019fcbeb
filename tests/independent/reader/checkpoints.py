"""Checkpoints: entries of tensors, rounding, `checkpoint.json` (docs/format-checkpoints.md)."""

import hashlib
import json
from pathlib import Path

import numpy as np
from independent.reader import deltas
from independent.reader.container import open_archive
from independent.reader.crc32c import crc32c
from independent.reader.tensor import (
    check,
    exponents,
    from_numbers,
    from_words,
)

_MANTISSA = {"float32": 23, "float16": 10, "bfloat16": 7}


def load(folder):
    """Return the state of a checkpoint; its base is a sibling folder."""
    archive, tensors = read_tensors(Path(folder))
    return archive.state(tensors)


def read_tensors(folder):
    """Return the archive and the tensors of a checkpoint by name."""
    about = read_about(folder / "checkpoint.json")
    raw = (folder / "state.safetensors").read_bytes()
    check(len(raw) == about["bytes"] and compute_id(raw) == about["id"], "another state")
    archive, before = open_archive(folder / "state.safetensors"), {}
    if about["base"]:
        _, before = read_tensors(folder.parent / about["base"]["name"])
        base = read_about(folder.parent / about["base"]["name"] / "checkpoint.json")
        check(base["id"] == about["base"]["id"], "another base")
    model = read_model(folder.parent, about["pretrained"]) if "pretrained" in about else {}
    return archive, apply_entries(archive, before.__getitem__, model)


def read_model(run, about):
    """Return the tensors of the pretrained model, which is at the first of its hints."""
    archive = open_archive(run / about["hints"][0] / "model.safetensors")
    tensors = archive.tensors()
    lines = sorted(f"{name} {deltas.compute_digest(x)}\n" for name, x in tensors.items())
    found = hashlib.sha256("".join(lines).encode()).hexdigest()[:32]
    check(found == about["id"], "another model")
    return tensors


def join(tensors, entry):
    """Return tensors of the pretrained model as one with the dtype and shape of an entry."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    parts = [cast(tensor, dtype) for tensor in tensors]
    check(len(parts) > 1 or parts[0].shape == shape, "wrong shape")
    return from_words(dtype, shape, np.concatenate([part.words().reshape(-1) for part in parts]))


def read_about(path):
    """Parse `checkpoint.json` and check its seal, which version 1 lacks."""
    raw = path.read_bytes()
    about = json.loads(raw)
    check(about["format"] == "slimtensors checkpoint" and about["version"] in (1, 2, 3), "version")
    check((about["version"] == 3) == ("pretrained" in about), "pretrained")
    if about["version"] > 1:
        sealed = raw.rpartition(b',\n  "crc32c": ')[0]
        check(raw == sealed + b',\n  "crc32c": %d\n}\n' % crc32c(sealed), "seal")
    return about


def compute_id(raw):
    """Return the id of a state: its header and the beginning of each tensor."""
    size = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + size].rstrip(b" ")
    found = hashlib.sha256(header)
    tensors = json.loads(header)
    tensors.pop("__metadata__")
    for entry in tensors.values():
        begin, end = entry["data_offsets"]
        found.update(raw[8 + size :][begin : min(end, begin + 16)])
    return found.hexdigest()[:32]


def apply_entries(archive, find_base, model=None):
    """Return all tensors of an archive; `find_base` returns the base's tensor of a name.

    `model` contains the tensors of the pretrained model.
    """
    stored = archive.tensors()
    if "delta" not in archive.manifest:
        return stored
    delta = archive.manifest["delta"]
    entries, homes = delta["checkpoint"], delta["tied"] | delta.get("copies", {})
    found = {}
    for name in sorted(entries, key=lambda name: "by" in entries[name]):  # what others need first
        entry = entries[name]
        other = found[entry["by"]] if "by" in entry else None
        if "base" in entry:
            names = entry.get("from")
            other = join([model[part] for part in names], entry) if names else find_base(name)
            check(deltas.compute_digest(other) == entry["base"], f"{name}: another base")
        found[name] = decode_entry(entry, stored.get(name), other)
    return found | {name: found[home] for name, home in homes.items()}


def decode_entry(entry, stored, other):
    """Return the tensor that an entry describes."""
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    bits = entry.get("bits")
    short = "bfloat16" if dtype == "float32" and bits is not None and bits <= 7 else dtype
    match entry["as"]:
        case "whole":
            check(stored.dtype == short, "wrong dtype")
            result = stored
        case "same":
            result = other
        case "difference" | "by-exponent" as kind:
            result = deltas.add_difference(kind, stored, predict(entry, other))
        case "grouped":
            order = exponents(cast(other, short))
            result = from_words(short, shape, deltas.ungroup(stored.words(), order))
        case "steps":
            change = stored.numbers().astype(np.float32) * np.float32(entry["step"])
            result = from_numbers("float32", shape, other.numbers().astype(np.float32) + change)
        case "roots":
            unit = np.sqrt(other.numbers().astype(np.float32)) * np.float32(entry["step"])
            result = from_numbers("float32", shape, stored.numbers().astype(np.float32) * unit)
    check(result.shape == shape, "wrong shape")
    return cast(result, dtype)


def cast(tensor, dtype):
    """Return the numbers in another dtype, to nearest."""
    if tensor.dtype == dtype:
        return tensor
    return from_numbers(dtype, tensor.shape, tensor.numbers())


def predict(entry, base):
    """Return the base's tensor times `times`, rounded to `bits` by `seed`."""
    if "times" in entry:
        number = np.float64 if base.dtype == "float64" else np.float32
        product = base.numbers().astype(number) * number(entry["times"])
        base = from_numbers(base.dtype, base.shape, product)
    return round_bits(base, entry["bits"], entry.get("seed")) if "bits" in entry else base


def round_bits(tensor, bits, seed):
    """Round floats to `bits` bits of mantissa, to nearest or by a seed."""
    drop = max(0, _MANTISSA[tensor.dtype] - bits)
    words = tensor.words().astype(np.uint32)
    if drop and seed is None:
        words = words + (1 << drop - 1) - 1 + (words >> drop & 1)
    elif drop:
        words = words + (hash_numbers(seed, tensor.count) >> 32 - drop)
    words = words >> drop << drop
    if tensor.dtype == "float32" and bits <= 7:
        return from_words("bfloat16", tensor.shape, (words >> 16).astype("<u2"))
    return from_words(tensor.dtype, tensor.shape, words.astype(f"<u{tensor.item_bytes}"))


def hash_numbers(seed, count):
    """Return h(i + seed) for all items: the same random numbers on every machine."""
    x = np.arange(count, dtype=np.uint32) + np.uint32(seed)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ x >> shift) * np.uint32(factor)
    return x ^ x >> 16
