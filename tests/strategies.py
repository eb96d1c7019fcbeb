"""Tensors for property tests: every dtype, every kind of shape, raw bit patterns."""

import math

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.vendor import pretty
from torch import Tensor

from slimtensors.tensor import DTYPES

SAFETENSORS_DTYPES = {
    name: dtype
    for name, dtype in DTYPES.items()
    if name not in {"complex32", "complex128"}
    and not name.startswith("bits")
    and not (name.strip("uint").isdigit() and int(name.strip("uint")) < 8)
}
"""The dtypes that safetensors has a name for, listed independently of the library."""

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits."""
    return a.dtype == b.dtype and a.shape == b.shape and raw_bytes(a) == raw_bytes(b)


ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}
"""How far two results of the same computation may be apart, relative to the greatest."""


def same_results(a: Tensor, b: Tensor) -> bool:
    """Return True if two results of a computation differ by rounding at most.

    Kernels sum in an order that depends on the instruction set, the threads, and the addresses of
    their operands: the outputs of two models with equal weights need not be bitwise equal.
    """
    a, b = a.detach(), b.detach()
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    greatest = b.abs().max().item() if b.numel() else 0.0
    return torch.allclose(a, b, rtol=0, atol=ROUNDING[a.dtype] * greatest, equal_nan=True)


def aligned(model: torch.nn.Module) -> torch.nn.Module:
    """Move weights that are mapped from a file at an odd offset to aligned memory.

    Then the same kernels sum in the same order as for weights that torch has allocated.
    """
    for x in (*model.parameters(), *model.buffers()):
        if type(x.data) is Tensor and x.data_ptr() % 64:
            x.data = x.data.clone()
    return model


def raw_bytes(x: Tensor) -> bytes:
    """Return the bits of a tensor in row-major order."""
    x = x.detach().cpu().resolve_conj().resolve_neg()
    words = x.view(_WORDS[x.element_size()])  # some dtypes have no copy kernel
    return words.numpy().tobytes()


def same_tensors(a, b) -> bool:
    """Tell whether two tables have the same names in the same order, and the same bits."""
    return list(a) == list(b) and all(same_bits(x, b[name]) for name, x in a.items())


def bits(seed: int, count: int, dtype: torch.dtype, density: float) -> Tensor:
    """Return `count` items of raw bits: zeros, signed zeros, NaN payloads, single bits, noise."""
    rng = np.random.default_rng(seed)
    size = dtype.itemsize
    items = rng.integers(0, 256, (count, size), dtype=np.uint8)
    kind = rng.random(count)
    items[kind < 0.1] = [*[0] * (size - 1), 0x80]  # -0.0, or the least integer
    items[(kind >= 0.1) & (kind < 0.2)] = 0xFF  # a NaN with all of its payload, or -1
    lonely = (kind >= 0.2) & (kind < 0.3)
    items[lonely] = 0
    items[lonely, rng.integers(0, size, lonely.sum())] = 1 << rng.integers(0, 8, lonely.sum())
    if dtype is torch.bool:
        items = np.ones_like(items)  # a byte other than 0 and 1 is no bool
    items[rng.random(count) >= density] = 0
    return torch.from_numpy(items.reshape(-1)).view(dtype)


def keep_two_of_four(x: Tensor, seed: int) -> Tensor:
    """Return a copy of a flat tensor in which two of every four items are zero."""
    size = x.element_size()
    items = np.frombuffer(bytearray(raw_bytes(x)), np.uint8).reshape(-1, 4, size)
    order = np.random.default_rng(seed).random(items.shape[:2]).argsort(1)
    items[order < 2] = 0
    return torch.from_numpy(items.reshape(-1)).view(x.dtype)


def _print(x: Tensor, printer, cycle) -> None:
    """Show a tensor by its bits; torch cannot print tensors of every dtype."""
    raw = raw_bytes(x)
    shown = raw[:64].hex(" ", x.element_size()) + (" …" if len(raw) > 64 else "")
    printer.text(f"<{x.dtype} {tuple(x.shape)} strides {x.stride()}: {shown}>")


pretty.for_type_by_name("torch", "Tensor", _print)

shapes = st.one_of(
    st.sampled_from([(), (0,), (1,), (3, 0, 2), (0, 4), (8,), (64,), (65,), (2, 3, 4, 5, 6)]),
    st.lists(st.integers(0, 9), max_size=5).map(tuple),
    st.tuples(st.integers(1, 12), st.integers(1, 120)),
)
shapes_24 = st.lists(st.integers(0, 9), min_size=1, max_size=5).map(
    lambda sizes: (*sizes[:-1], 4 * sizes[-1])
)


@st.composite
def tensors(draw, dtypes=DTYPES, shapes=shapes, two_four=False) -> Tensor:
    """Draw a tensor, contiguous or not."""
    dtype = dtypes[draw(st.sampled_from(sorted(dtypes)))]
    shape = draw(shapes)
    seed = draw(st.integers(0, 2**32 - 1))
    density = draw(st.sampled_from([0.0, 0.05, 0.3, 0.5, 1.0]))
    x = bits(seed, math.prod(shape), dtype, density)
    if two_four:
        x = keep_two_of_four(x, seed)
    layout = draw(st.sampled_from(["plain", "plain", "transposed", "sliced", "shifted"]))
    return laid_out(x, shape, layout)


def laid_out(x: Tensor, shape: tuple[int, ...], layout: str) -> Tensor:
    """Return the items of a flat tensor in `shape`, lying in memory in some other way."""
    words = x.view(_WORDS[x.element_size()])
    if layout == "transposed":
        axes = tuple(reversed(range(len(shape))))
        out = words.reshape(shape).permute(axes).contiguous().permute(axes)
    elif layout == "sliced":
        out = torch.stack([words, words.flip(0)], -1).reshape(-1)[::2].unflatten(0, (-1, 1))
        out = out.as_strided(shape, [2 * n for n in _strides(shape)], out.storage_offset())
    elif layout == "shifted":
        out = torch.cat([words[:1], words])[1:].view(shape) if x.numel() else words.view(shape)
    else:
        out = words.view(shape)
    return out.view(x.dtype)


def _strides(shape: tuple[int, ...]) -> list[int]:
    return [math.prod(shape[i + 1 :]) for i in range(len(shape))]


def two_four_tensors(dtypes=DTYPES):
    """Draw tensors of which two in every four neighbours are zero."""
    return tensors(dtypes=dtypes, shapes=shapes_24, two_four=True)
