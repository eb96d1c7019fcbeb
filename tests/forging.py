"""Damaged and hostile files must give `FormatError` kinds that name the file, in little memory.

Nothing may raise anything else, and nothing may be believed before it was checked.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_tools import plain_file, read_table, sample

import slimtensors

DIALECTS = pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
INDEX = "model.safetensors.index.json"
TB = 1 << 40

X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(range(8))


def save_sample(path: Path, dialect: str) -> bytes:
    slimtensors.save(sample(), path, dialect=dialect)
    return path.read_bytes()


STRANGE: list[Any] = [
    None,
    True,
    False,
    -1,
    3,
    1.0,
    1e300,
    2**31,
    2**63 - 1,
    2**63,
    2**64,
    10**40,
    "",
    "F32",
    "F4",
    "\0",
    [],
    {},
    [None],
    [True],
    [True, True],
    [0, True],
    [False, 8],
    [0.0, 8.0],
    [0],
    [0, 8, 8],
    [-8, 0],
    [8, 0],
    [8, 16],
    [-1, 7],
    [0, -8],
    [0, 2**64 + 8],
    [2**64, 2**64 + 8],
    [0, 10**40],
    ["0", "8"],
    [[0], [8]],
    {"0": 8},
    [-2],
    [-2, -1],
    [2.0],
    ["2"],
    [2**62, 4],
    [2**32, 2**32],
    [0, 2**62],
    [1] * 100,
    [1] * 65 + [2],
]


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


def foreign(**change: torch.Tensor | None) -> bytes:
    """Return a file as compressed-tensors writes it, with other parts or without them."""
    parts = {
        "m.weight.compressed": torch.tensor([1.0, 2.0]),
        "m.weight.bitmask": torch.tensor([[1], [128]], dtype=torch.uint8),
        "m.weight.shape": torch.tensor([2, 8]),
        "m.weight.row_offsets": torch.tensor([0, 1]),
    }
    parts |= {f"m.weight.{key}": value for key, value in change.items()}
    return plain_file({key: value for key, value in parts.items() if value is not None})


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_index_of(folder: Path, *shards: str) -> None:
    write_index(folder, {name: shard for shard in shards for name in read_table(folder / shard)})
