"""Weights that nobody changed are written as they were, where writing them anew would differ.

Those are lossy ones, for rounding twice would lose twice, and those that run compressed.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.state import Item
from slimtensors.dialects import Packed
from slimtensors.errors import FormatError
from slimtensors.plan import Encoded
from slimtensors.spec import Each, as_bytes
from slimtensors.tensors import CompressedTensor

_log = logging.getLogger(__name__)


def unchanged(items: Sequence[Item], files: Sequence[Path]) -> list[Item]:
    """Return `items`, those that would else differ to be copied from there if equal."""
    if not files:
        return list(items)
    try:
        archive = Archive.of_files(files)
    except (OSError, FormatError) as error:
        _log.warning("weights are rounded anew, as they cannot be compared with the old: %s", error)
        return list(items)
    return [_copied(item, archive) for item in items]


def _copied(item: Item, archive: Archive) -> Item:
    name = item.name
    plan = archive.plan(name) if name in archive else None
    if plan is None or archive.spec(name) != item.spec:
        return item

    def is_same(x: object, each: Each) -> bool:
        if isinstance(x, CompressedTensor):
            old = archive.load_compressed(name, each)
            return isinstance(old, CompressedTensor) and torch.equal(old, x)
        if not plan.is_lossy or not isinstance(x, Tensor):
            return False
        return torch.equal(as_bytes(archive.load_one(name, each)), as_bytes(x))

    def read(each: Each) -> Tensor | Encoded | Packed | None:
        x = item.read(each)
        return archive.packed(name) if is_same(x, each) else x

    return replace(item, read=read)
