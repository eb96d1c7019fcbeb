"""Lossy weights that nobody changed are written as they were: rounding twice would lose twice."""

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

_log = logging.getLogger(__name__)


def unchanged(items: Sequence[Item], files: Sequence[Path]) -> list[Item]:
    """Return `items`, those that are in `files` with a loss to be copied from there if equal."""
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
    if plan is None or not plan.is_lossy or archive.spec(name) != item.spec:
        return item

    def read(each: Each) -> Tensor | Encoded | Packed | None:
        x = item.read(each)
        old = as_bytes(archive.load_one(name, each))
        is_same = isinstance(x, Tensor) and torch.equal(old, as_bytes(x))
        return archive.packed(name) if is_same else x

    return replace(item, read=read)
