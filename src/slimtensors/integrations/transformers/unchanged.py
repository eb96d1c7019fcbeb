"""Weights that nobody changed are written as they were, where writing them anew would differ.

Those are lossy ones, for rounding twice would lose twice, and those that run compressed.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.state import Item
from slimtensors.dialects import Packed
from slimtensors.errors import FormatError
from slimtensors.integrations.transformers.weights import same
from slimtensors.plan import Encoded
from slimtensors.spec import Each
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

    def read(each: Each) -> Tensor | Encoded | Packed | None:
        x = item.read(each)
        is_held = isinstance(x, CompressedTensor)
        if not isinstance(x, Tensor) or not (is_held or plan.is_lossy):
            return x
        old = archive.load_compressed(name, each) if is_held else archive.load_one(name, each)
        return archive.packed(name) if same(old, x) else x

    return replace(item, read=read)
