"""Deltas: tensors as exact differences from those of a base (docs/format.md#deltas)."""

import hashlib

import numpy as np
from independent.reader import changes
from independent.reader.tensor import check, exponents, from_words, is_float


def restore(delta, base):
    """Return the tensors of a delta; `delta` and `base` are archives."""
    about, stored, before = delta.manifest["delta"], delta.tensors(), base.tensors()
    names = about.get("names", {})
    found = {}
    for name, entry in about["tensors"].items():
        home = names.get(name, name)
        match entry:
            case ["whole"]:
                found[name] = stored[name]
            case ["same", digest]:
                check(compute_digest(before[home]) == digest, f"{home}: another base")
                found[name] = before[home]
            case [kind, digest]:
                check(compute_digest(before[home]) == digest, f"{home}: another base")
                found[name] = add_difference(kind, stored[name], before[home])
    for name, home in about["tied"].items():
        found[name] = found[home]
    return found


def compute_digest(tensor):
    """Return the digest that identifies a tensor of the base."""
    text = f"{tensor.dtype} {list(tensor.shape)}\n"
    return hashlib.sha256(text.encode() + tensor.data).hexdigest()[:32]


def add_difference(kind, stored, base):
    """Return the tensor with this residual against its base."""
    if kind in ("sparse-change", "expected-change"):
        return changes.apply(kind, stored, base)
    words = stored.words()
    one = words.dtype.type(1)
    change = words >> one ^ (0 - (words & one)).astype(words.dtype)  # undo the zigzag
    bits = base.words()
    if kind == "by-exponent":
        change = ungroup(change, exponents(base))
        negative = bits >> bits.dtype.type(8 * base.item_bytes - 1) == 1
        change = np.where(negative, 0 - change, change).astype(words.dtype)
    if is_float(base.dtype):
        return from_words(base.dtype, base.shape, unorder(order(bits) + change))
    return from_words(base.dtype, base.shape, bits + change)


def ungroup(items, groups):
    """Undo a stable sort by `groups`."""
    out = np.empty_like(items)
    out[np.argsort(groups, kind="stable")] = items
    return out


def order(bits):
    """Map the bits of floats to numbers in the order of the floats."""
    sign = bits.dtype.type(1 << 8 * bits.itemsize - 1)
    return np.where(bits & sign, ~bits, bits ^ sign)


def unorder(numbers):
    """Undo `order`."""
    sign = numbers.dtype.type(1 << 8 * numbers.itemsize - 1)
    return np.where(numbers & sign, numbers ^ sign, ~numbers)
