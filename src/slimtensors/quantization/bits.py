"""Codes of a few bits, packed into 32-bit words.

A row of codes starts on a new word. Since release 0.18 of compressed-tensors code i of a row lies
at bits `i * bits` to `(i + 1) * bits` of a little-endian stream (layout `stream`); before, no code
lay in two words, so that 3, 5, 6 and 7 bits left some of each word unused (layout `words`). For
other widths both are the same.
"""

from typing import Literal

import torch
from torch import Tensor

from slimtensors.errors import CorruptFileError

Layout = Literal["stream", "words"]

_WORD = 32


def width(columns: int, bits: int, layout: Layout = "stream") -> int:
    """Return how many words a row takes."""
    if layout == "stream":
        return -(-columns * bits // _WORD)
    return -(-columns // (_WORD // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes `[..., columns]` into int32 words `[..., width]`, the lowest code as 0."""
    columns = codes.shape[-1]
    spread = _bits_of(codes.int() + (1 << bits - 1), bits).flatten(-2)
    padding = width(columns, bits) * _WORD - columns * bits
    spread = torch.nn.functional.pad(spread, (0, padding))
    return _joined(spread.reshape(*codes.shape[:-1], -1, _WORD)).to(torch.int32)


def unpack(words: Tensor, bits: int, columns: int, layout: Layout = "stream") -> Tensor:
    """Undo `pack`."""
    spread = _bits_of(words, _WORD)
    if layout == "words":
        spread = spread[..., : _WORD // bits * bits]
    stream = spread.flatten(-2)[..., : columns * bits]
    return (_joined(stream.reshape(*words.shape[:-1], columns, bits)) - (1 << bits - 1)).to(
        torch.int8
    )


def possible_layouts(words: Tensor, bits: int, columns: int) -> set[Layout]:
    """Return the layouts that words can have: they fill their rows, and unused bits are zero."""
    found: set[Layout] = set()
    if words.shape[-1] == width(columns, bits, "stream"):
        unused = width(columns, bits) * _WORD - columns * bits
        last = words[..., -1:]
        if not unused or not (last.long() & 0xFFFFFFFF).bitwise_right_shift(_WORD - unused).any():
            found.add("stream")
    if words.shape[-1] == width(columns, bits, "words"):
        again = _repacked(words, bits, columns)
        if torch.equal(again, words):
            found.add("words")
    if not found:
        raise CorruptFileError(
            f"{words.shape[-1]} words per row do not hold {columns} codes of {bits} bits"
        )
    return found


def _repacked(words: Tensor, bits: int, columns: int) -> Tensor:
    """Return the words without the bits that the layout `words` leaves unused."""
    count = _WORD // bits
    kept = torch.full((width(columns, bits, "words"),), _mask(count * bits), dtype=torch.int64)
    kept[-1] = _mask(((columns - 1) % count + 1) * bits)
    return (words.long() & kept.to(words.device) & 0xFFFFFFFF).to(torch.int32)


def _mask(bits: int) -> int:
    return (1 << bits) - 1


def _bits_of(x: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(bits, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) >> shifts) & 1


def _joined(bits: Tensor) -> Tensor:
    shifts = torch.arange(bits.shape[-1], device=bits.device)
    return (bits.long() << shifts).sum(-1)
