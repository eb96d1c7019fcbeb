"""Tensors of many kinds for the bins codec."""

import numpy as np
import torch

from slimtensors.tensor import view_as

DTYPE_NAMES = [
    "bfloat16",
    "float16",
    "float32",
    "float64",
    "float8_e4m3fn",
    "int8",
    "uint16",
    "int32",
]
FLOATS = {"weights", "rounded", "marked", "positive"}
CONTENTS = ["random", "weights", "rounded", "marked", "constant", "integers", "few", "positive"]


def make_tensor(rng, kind, spec):
    """Return a tensor of this dtype and shape that takes a separate code path."""
    shape = spec.shape if len(spec.shape) == 2 else (1, spec.numel)
    weights = make_weights(rng, *shape)
    if kind == "positive":
        weights = weights.abs()
    if kind == "rounded":
        weights = weights.to(torch.bfloat16).double()
    if kind == "marked":
        weights[::3] = weights[::3].to(torch.float16).double()
    if spec.dtype.is_floating_point and spec.dtype.itemsize > 1 and kind in FLOATS:
        return weights.to(spec.dtype).reshape(spec.shape)
    raw = rng.integers(0, 256, spec.nbytes, dtype=np.uint8)
    if kind == "constant":
        raw[:] = rng.integers(256)
    if kind in ("integers", *FLOATS) and spec.dtype.itemsize in (1, 2, 4, 8):
        small = (weights.numpy().ravel() * 1e4).astype(np.int64)[: spec.numel]
        raw = small.astype(f"<i{spec.dtype.itemsize}").view(np.uint8)
    if kind == "few":
        raw = rng.choice(np.array([3, 200, 201], np.uint8), spec.nbytes, p=[0.9, 0.09, 0.01])
    return view_as(memoryview(bytearray(raw)), spec)


def make_weights(rng, rows, columns):
    """Return numbers like weights, with rows and columns of different scale."""
    scales = [np.exp(rng.normal(0, 0.8, n)) for n in (rows, columns)]
    return torch.from_numpy(rng.normal(0, 0.02, (rows, columns)) * np.outer(*scales))
