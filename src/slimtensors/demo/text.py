"""Text that every installation of Python has: the sources of its standard library."""

import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

LENGTH = 128
"""Bytes, or tokens, that a model sees at once."""

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
_EVERY = 12
"""One file of so many is kept apart, to measure on."""
_PIECES, _PIECE = 128, 1024


def seen() -> bytes:
    """Return the text to train on."""
    apart = set(_apart())
    return _joined(path for path in _sources() if path not in apart)


def unseen() -> bytes:
    """Return the text to measure on."""
    return _joined(_apart())


def excerpt(text: bytes) -> str:
    """Return pieces from all over a text, as much as it takes to see what a model does."""
    step = max(len(text) // _PIECES, 1)
    pieces = (text[i : i + _PIECE] for i in range(0, len(text), step))
    return b"".join(pieces).decode(errors="ignore")


def rows(text: bytes, count: int, *, seed: int) -> Tensor:
    """Return random pieces of a text, one number per byte."""
    numbers = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    random = torch.Generator().manual_seed(seed)
    starts = torch.randint(0, len(numbers) - LENGTH, (count, 1), generator=random)
    return numbers[starts + torch.arange(LENGTH)].long()


def _sources() -> list[Path]:
    return sorted(LIBRARY.glob("*.py"))


def _apart() -> list[Path]:
    return _sources()[::_EVERY]


def _joined(paths: Iterable[Path]) -> bytes:
    return b"".join(path.read_bytes() for path in paths)
