"""Codes of a few bits, packed into 32-bit words.

A row of codes starts on a new word. Since release 0.18 of compressed-tensors code i of a row lies
at bits `i * bits` to `(i + 1) * bits` of a little-endian stream (layout `stream`); before, no code
lay in two words, so that 3, 5, 6 and 7 bits left some of each word unused (layout `words`). For
other widths both are the same.
"""

from typing import Literal

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import CorruptFileError
from slimtensors.memory import empty
from slimtensors.spec import Spec, as_bytes

Layout = Literal["stream", "words"]

_WORD = 32


def width(columns: int, bits: int, layout: Layout = "stream") -> int:
    """Return how many words a row takes."""
    if layout == "stream":
        return -(-columns * bits // _WORD)
    return -(-columns // (_WORD // bits))


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack int8 codes `[..., columns]` into int32 words `[..., width]`, the lowest code as 0."""
    *outer, columns = codes.shape
    words = empty(Spec(torch.int32, (*outer, width(columns, bits))))
    _core.pack_codes(as_bytes(codes.cpu()), bits, columns, as_bytes(words))
    return words.to(codes.device)


def unpack(words: Tensor, bits: int, columns: int, layout: Layout = "stream") -> Tensor:
    """Undo `pack`."""
    outer = words.shape[:-1]
    if layout == "words":
        shifts = range(0, _WORD // bits * bits, bits)
        codes = [((words >> shift) & _mask(bits)).to(torch.uint8) for shift in shifts]
        whole = torch.stack(codes, -1).reshape(*outer, -1)[..., :columns]
        return (whole - (1 << bits - 1)).view(torch.int8)
    out = empty(Spec(torch.int8, (*outer, columns)))
    _core.unpack_codes(as_bytes(words.cpu()), bits, columns, as_bytes(out))
    return out.to(words.device)


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
