"""2:4 sparse tensors: at most two nonzero items in every group of four."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import bitmask
from slimtensors.codecs.protocol import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, as_bytes, ceil_div, empty_bytes


@register
@dataclass(frozen=True)
class Bitmask24:
    """Store two of every four values, and their positions in 0.67 bits per item. Lossless.

    Encoding raises if any group of four in a row has more than two nonzero items.
    """

    name: ClassVar[str] = "bitmask24"
    part_names: ClassVar[tuple[str, ...]] = ("codes", "values")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `codes` (three groups of four per byte) and `values`."""
        mask, values = select(x, x.numel(), each)
        if x.numel() % 8:
            mask[-1] |= 0x30  # pad the last half byte with a valid pattern
        codes = empty_bytes(ceil_div(2 * mask.numel(), 3))
        _core.mask24_pack(mask, codes)
        return {"codes": codes, "values": values}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Unpack the mask, then scatter `values`."""
        size = bitmask.mask_bytes(like.numel, like.numel)
        codes = parts["codes"]
        if codes.dtype is not torch.uint8 or codes.numel() != ceil_div(2 * size, 3):
            raise CorruptFileError(f"{codes.numel()} codes do not fit shape {like.shape}")
        mask = empty_bytes(size)
        try:
            _core.mask24_unpack(as_bytes(codes), mask)
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
        if like.numel % 8:
            mask[-1] &= 0x0F
        return bitmask.scatter(mask, as_bytes(parts["values"]), like, like.numel, each)

    def step(self, spec: Spec) -> int:
        """Return 24: slices start at whole bytes of both mask (8 items) and codes (12 items)."""
        return 24


def select(x: Tensor, row: int, each: Each) -> tuple[Tensor, Tensor]:
    """Return the mask that `select_mask` returns, and the values under it."""
    if x.dim() == 0 or x.shape[-1] % 4:
        raise ConfigError(
            f"2:4 sparsity needs a last dimension divisible by 4, got shape {tuple(x.shape)}"
        )
    items = as_bytes(x)
    mask = select_mask(items, x.element_size(), row, each)
    counts = [(last - first) // 2 for first, last, _, _ in bitmask.row_chunks(x.numel(), row)]
    values = bitmask.gather(items, x.element_size(), row, mask, counts, each)
    return mask, values.view(x.dtype)


def select_mask(items: Tensor, itemsize: int, row: int, each: Each) -> Tensor:
    """Return a mask with two bits set per group of four items, in rows of `row` items.

    `items` are given as bytes. Raise `ConfigError` if a group has more than two nonzero items.
    """
    mask, _ = bitmask.find_nonzero(items, itemsize, row, each)
    group = _core.mask24_fill(mask)
    if group >= 0:
        raise ConfigError(f"not 2:4 sparse: more than two nonzero items in group {group}")
    if row % 8:  # clear the half byte of padding at the end of each row
        mask.view(-1, ceil_div(row, 8))[:, -1] &= 0x0F
    return mask


def is_24(x: Tensor) -> bool:
    """Return True if every group of four items in a row has at most two nonzero ones."""
    if x.dim() == 0 or x.shape[-1] % 4:
        return False
    items, itemsize = as_bytes(x), x.element_size()
    # Most other tensors are rejected by their first few items.
    return _is_24(items[: itemsize << 14], itemsize) and _is_24(items, itemsize)


def _is_24(items: Tensor, itemsize: int) -> bool:
    try:
        select_mask(items, itemsize, items.numel() // itemsize, serially)
    except ConfigError:
        return False
    return True
