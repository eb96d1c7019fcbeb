"""Batches without what fills up their rows: it would count as data."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from slimtensors.errors import ConfigError
from slimtensors.quantization.algorithms.blocks import Batch

MASK = "attention_mask"
"""What tells tokens from padding."""


def without_padding(model: nn.Module, batches: Iterable[Batch]) -> list[Batch]:
    """Return batches of rows of equal length, without the tokens that `attention_mask` leaves out.

    The mask is one of two dimensions, in a batch that is a mapping; others stay as they are. So
    padding is neither in Hessians nor in the ranges of inputs, and every token stands where it
    would stand if its row came alone. A batch that cannot be taken apart by rows raises. Those of
    an encoder with a decoder stay as they are: their mask says nothing about what is decoded.
    """
    given = list(batches)
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return given
    parts = [part for batch in given for part in _parts(batch)]
    if given and not parts:
        raise ConfigError(f"{MASK} leaves out every token")
    return parts


def _parts(batch: Batch) -> Iterator[Batch]:
    mask = batch.get(MASK) if isinstance(batch, Mapping) else None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.bool().all():
        yield batch
        return
    attended = mask.bool()
    lengths = attended.sum(1)
    _check(batch, mask)
    for length in sorted({*lengths.tolist()} - {0}):
        rows = lengths == length
        tokens = attended[rows].nonzero()[:, 1].view(-1, length)
        yield {name: _cut(x, mask, rows, tokens) for name, x in batch.items()}


def _cut(x: Any, mask: Tensor, rows: Tensor, tokens: Tensor) -> Any:
    """Return of some rows the tokens, if it has them; what else a single row has stays whole."""
    if not isinstance(x, Tensor) or not x.dim():
        return x
    if _is_shared(x, mask):
        x = x.expand(len(mask), *x.shape[1:])
    if x.shape[:2] != mask.shape:
        return x if len(mask) == 1 else x[rows]
    chosen = x[rows]
    which = torch.arange(len(chosen), device=x.device)[:, None]
    return chosen[which, tokens]


def _is_shared(x: Tensor, mask: Tensor) -> bool:
    """Tell whether all rows have the same, as positions often are."""
    return x.shape[:2] == (1, mask.shape[1])


def _check(batch: Mapping[str, Any], mask: Tensor) -> None:
    rows = len(mask)
    if rows == 1:
        return
    for name, x in batch.items():
        if isinstance(x, Tensor) and x.dim() and len(x) != rows and not _is_shared(x, mask):
            raise ConfigError(
                f"{name} has {len(x)} rows where {MASK} has {rows}, so that padding cannot be cut"
                " off; give each sample in a batch of its own"
            )
