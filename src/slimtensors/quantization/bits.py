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

_LAYOUTS: tuple[Layout, ...] = ("stream", "words")
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
    """Return the layouts that words can have: by their number, else by bits that are zero."""
    found: set[Layout] = {
        layout for layout in _LAYOUTS if words.shape[-1] == width(columns, bits, layout)
    }
    if not found:
        raise CorruptFileError(
            f"{words.shape[-1]} words per row do not hold {columns} codes of {bits} bits"
        )
    if len(found) == 1 or _WORD % bits == 0 or columns <= _WORD // bits:
        return found
    return {layout for layout in found if not _uses_spare_bits(words, bits, columns, layout)}


def _uses_spare_bits(words: Tensor, bits: int, columns: int, layout: Layout) -> bool:
    """Tell whether bits are set that a layout leaves unused."""
    count, used = words.shape[-1], columns * bits
    if layout == "words":
        whole = _WORD // bits * bits
        used -= (count - 1) * whole
    else:
        whole, used = _WORD, used - (count - 1) * _WORD
    kept = torch.tensor([_mask(whole)] * (count - 1) + [_mask(used)], device=words.device)
    return bool((words.long() & ~kept & _mask(_WORD)).any())


def _mask(bits: int) -> int:
    return (1 << bits) - 1
