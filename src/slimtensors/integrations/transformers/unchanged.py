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
    if name not in archive or archive.info(name).error is None or archive.spec(name) != item.spec:
        return item

    def ready(x: Tensor, each: Each) -> Packed | None:
        same = torch.equal(as_bytes(archive.load_one(name, each)), as_bytes(x))
        return archive.packed(name) if same else None

    return replace(item, ready=ready)
