"""Tensors of which two in every four items are zero (2:4 sparsity)."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs import bitmask
from slimtensors.codecs.protocol import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, as_bytes, ceil_div


@register
@dataclass(frozen=True)
class Bitmask24:
    """Store half of the values, and which two of four they are in 0.67 bit an item. Lossless.

    Every four neighbours in a row must have at most two nonzero items; others raise.
    """

    name: ClassVar[str] = "bitmask24"

    def encode(self, x: Tensor) -> Parts:
        """Return `codes` (three groups of four to a byte) and `values`."""
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Put `values` back where `codes` say."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Find the nonzero items, complete each group to two, then gather."""
        mask, values = select(x, x.numel(), each)
        if x.numel() % 8:
            mask[-1] |= 0x30  # a last half byte has to be some pattern
        codes = torch.empty(ceil_div(2 * mask.numel(), 3), dtype=torch.uint8)
        _core.mask24_pack(mask, codes)
        return {"codes": codes, "values": values}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Unpack the mask, then scatter."""
        size = bitmask.mask_bytes(like.numel, like.numel)
        codes = parts["codes"]
        if codes.dtype is not torch.uint8 or codes.numel() != ceil_div(2 * size, 3):
            raise CorruptFileError(f"{codes.numel()} codes do not fit shape {like.shape}")
        mask = torch.empty(size, dtype=torch.uint8)
        try:
            _core.mask24_unpack(as_bytes(codes), mask)
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
        if like.numel % 8:
            mask[-1] &= 0x0F
        return bitmask.scatter(mask, as_bytes(parts["values"]), like, like.numel, each)

    def step(self, spec: Spec) -> int:
        """Return the items of whole bytes of both mask and codes: 8 and 12 of them."""
        return 24


def select(x: Tensor, row: int, each: Each) -> tuple[Tensor, Tensor]:
    """Return the mask that `select_mask` returns, and the values under it."""
    if x.dim() == 0 or x.shape[-1] % 4:
        raise ConfigError(f"shape {tuple(x.shape)} cannot be 2:4: the last size must divide by 4")
    items = as_bytes(x)
    mask = select_mask(items, x.element_size(), row, each)
    counts = [(last - first) // 2 for first, last, _, _ in bitmask.row_chunks(x.numel(), row)]
    values = bitmask.gather(items, x.element_size(), row, mask, counts, each)
    return mask, values.view(x.dtype)


def select_mask(items: Tensor, itemsize: int, row: int, each: Each) -> Tensor:
    """Return a mask with two bits in every four items (given as bytes), in rows of `row` items.

    Raise `ConfigError` when four neighbours have more than two nonzero items.
    """
    mask, _ = bitmask.find_nonzero(items, itemsize, row, each)
    bad = _core.mask24_fill(mask)
    if bad >= 0:
        raise ConfigError(f"is not 2:4: more than two nonzero items in group {bad}")
    if row % 8:  # half a byte of padding at each row's end was filled as well
        mask.view(-1, ceil_div(row, 8))[:, -1] &= 0x0F
    return mask
