"""Sparse masks: the distances between set bits."""

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import ClassVar

import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    Parts,
    Spec,
    allocate,
    as_bytes,
    ceil_div,
    concatenate,
    empty_bytes,
)

_CHUNK = 1 << 17
"""Bytes per chunk, a mebibit: part of the format, because gaps restart with every chunk."""


@register
@dataclass(frozen=True)
class Gaps:
    """Store the number of zero bits before each set bit, a byte each. Lossless; for sparse masks.

    The bytes have few distinct values: pass `tokens` on to an entropy coder.
    """

    name: ClassVar[str] = "gaps"
    part_names: ClassVar[tuple[str, ...]] = ("tokens", "counts")

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `tokens`, and their `counts` per chunk if there are several chunks."""
        mask = as_bytes(x)
        pieces = each(
            lambda i: _encode_chunk(mask[i * _CHUNK : (i + 1) * _CHUNK]),
            ceil_div(mask.numel(), _CHUNK),
        )
        if len(pieces) <= 1:
            return {"tokens": pieces[0] if pieces else mask}
        counts = torch.tensor([piece.numel() for piece in pieces], dtype=torch.int32)
        return {"tokens": concatenate(pieces), "counts": counts}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Set the bits that `tokens` describe."""
        tokens = parts["tokens"]
        counts = _parse_counts(parts, ceil_div(like.nbytes, _CHUNK))
        if tokens.dtype is not torch.uint8 or tokens.dim() != 1 or sum(counts) != tokens.numel():
            raise CorruptFileError(f"expected {sum(counts)} gap tokens, got {tokens.numel()}")
        tokens = as_bytes(tokens)
        offsets = list(pairwise(accumulate(counts, initial=0)))
        out = allocate(like)
        mask = as_bytes(out)

        def decode_chunk(i: int) -> None:
            begin, end = offsets[i]
            _core.gaps_decode(tokens[begin:end], mask[i * _CHUNK : (i + 1) * _CHUNK])

        try:
            each(decode_chunk, len(offsets))
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
        return out


def _encode_chunk(mask: Tensor) -> Tensor:
    tokens = empty_bytes(_core.gaps_bound(mask))
    return tokens[: _core.gaps_encode(mask, tokens)]


def _parse_counts(parts: Parts, chunks: int) -> list[int]:
    if chunks <= 1:
        return [parts["tokens"].numel()] * chunks
    counts = parts["counts"]
    if counts.dtype is not torch.int32 or counts.shape != (chunks,) or bool((counts < 0).any()):
        raise CorruptFileError(f"invalid gap token counts for {chunks} chunks")
    values: list[int] = counts.tolist()
    return values
