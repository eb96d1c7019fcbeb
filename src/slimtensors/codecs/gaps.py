"""Masks with few ones: the distances between them."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import concatenate, register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, allocate, as_bytes, ceil_div

_CHUNK = 1 << 17
"""Bytes per chunk, a mebibit: part of the format, because every chunk starts its gaps anew."""


@register
@dataclass(frozen=True)
class Gaps:
    """Store how many zero bits lie before each one bit, a byte each. Lossless; for sparse masks.

    The bytes have few different values: send `tokens` through an entropy coder.
    """

    name: ClassVar[str] = "gaps"

    def encode(self, x: Tensor) -> Parts:
        """Return `tokens`, and `counts` of them per chunk if there are several chunks."""
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Set the bits that `tokens` lead to."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Write the tokens of every chunk, then join them."""
        mask = as_bytes(x)
        pieces = each(
            lambda i: _tokens(mask[i * _CHUNK : (i + 1) * _CHUNK]), ceil_div(mask.numel(), _CHUNK)
        )
        if len(pieces) <= 1:
            return {"tokens": pieces[0] if pieces else mask}
        counts = torch.tensor([piece.numel() for piece in pieces], dtype=torch.int32)
        return {"tokens": concatenate(pieces), "counts": counts}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Decode every chunk on its own."""
        tokens = parts["tokens"]
        counts = _counts(parts, ceil_div(like.nbytes, _CHUNK))
        if tokens.dtype is not torch.uint8 or tokens.dim() != 1 or sum(counts) != tokens.numel():
            raise CorruptFileError(f"{tokens.numel()} gap tokens, but {sum(counts)} are announced")
        tokens = as_bytes(tokens)
        offsets = list(pairwise(accumulate(counts, initial=0)))
        out = allocate(like)
        mask = as_bytes(out)

        def one(i: int) -> None:
            begin, end = offsets[i]
            _core.gaps_decode(tokens[begin:end], mask[i * _CHUNK : (i + 1) * _CHUNK])

        try:
            each(one, len(offsets))
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
        return out


def _tokens(mask: Tensor) -> Tensor:
    tokens = torch.empty(_core.gaps_bound(mask), dtype=torch.uint8)
    return tokens[: _core.gaps_encode(mask, tokens)]


def _counts(parts: Parts, chunks: int) -> list[int]:
    if chunks <= 1:
        return [parts["tokens"].numel()] * chunks
    counts = parts["counts"]
    if counts.dtype is not torch.int32 or counts.shape != (chunks,) or bool((counts < 0).any()):
        raise CorruptFileError(f"not the number of gap tokens in each of {chunks} chunks")
    values: list[int] = counts.tolist()
    return values
