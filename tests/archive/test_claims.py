"""A kilobyte that claims a terabyte."""

import struct
import time
from typing import Any

import pytest
import torch
from forging import TB, foreign
from reliability_tools import blob, blob_file, build_file, load_with_limit, sample

import slimtensors

pytestmark = pytest.mark.hostile


def bomb(levels: int) -> bytes:
    """Return a blob whose mask is compressed by a mask that is compressed by a mask …"""
    size = 32 * 8**levels
    inner: dict[str, Any] = {"dtype": "uint8", "shape": [32], "at": [0, 32]}
    none = {"dtype": "uint8", "shape": [0], "at": [0, 0]}
    for level in range(1, levels + 1):
        inner = {
            "dtype": "uint8",
            "shape": [32 * 8**level],
            "codec": {"name": "bitmask"},
            "parts": {"mask": inner, "values": none},
        }
    assert inner["shape"] == [size]
    return blob(inner, bytes(32))


def copies(count: int, size: int) -> bytes:
    """Return a blob of many parts that are all the same bytes."""
    leaf = {"dtype": "uint8", "shape": [size], "at": [0, size]}
    one = {"dtype": "uint8", "shape": [size], "codec": {"name": "dense"}, "parts": {"data": leaf}}
    parts = {f"p{i}": one for i in range(count)}
    return blob(
        {
            "dtype": "uint8",
            "shape": [size],
            "codec": {"name": "dense"},
            "parts": {"data": leaf, **parts},
        },
        bytes(size),
    )


def terabytes() -> dict[str, bytes]:
    items = {"dtype": "F32", "shape": [TB // 4], "data_offsets": [0, TB]}
    u8 = {"dtype": "uint8", "shape": [8], "at": [0, 8]}
    empty = {"dtype": "float32", "shape": [0], "at": [8, 8]}
    shape = [TB // 4]

    def claim(codec: str, parts: dict[str, Any], shape: list[int] = shape) -> bytes:
        return blob_file(
            blob(
                {"dtype": "float32", "shape": shape, "codec": {"name": codec}, "parts": parts},
                bytes(16),
            )
        )

    return {
        "offsets": build_file({"x": items}, bytes(900)),
        "shape": build_file({"x": {**items, "data_offsets": [0, 8]}}, bytes(8)),
        "header": struct.pack("<Q", TB) + bytes(1000),
        "largest header": struct.pack("<Q", 100_000_000) + b"{" + bytes(1000),
        "bitmask": claim("bitmask", {"mask": u8, "values": empty}),
        "bitmask in rows": claim("bitmask", {"mask": u8, "values": empty}, [2**20, 2**18]),
        "bitmask24": claim("bitmask24", {"codes": u8, "values": empty}),
        "dense": claim("dense", {"data": u8}),
        "part": claim("dense", {"data": {"dtype": "uint8", "shape": [TB], "at": [0, TB]}}),
        "part's shape": claim("dense", {"data": {**u8, "shape": [TB]}}),
        "inner tensor": claim(
            "dense",
            {
                "data": {
                    "dtype": "uint8",
                    "shape": [TB],
                    "codec": {"name": "bitmask"},
                    "parts": {"mask": u8, "values": empty},
                }
            },
        ),
        "many sizes": claim("dense", {"data": u8}, [2] * 40),
        "bomb": blob_file(bomb(12)),
        "small bomb": blob_file(bomb(8)),
        "copies": blob_file(copies(2000, 200_000)),
        "shape part": foreign(shape=torch.tensor([2**20, 2**18])),
        "flat shape part": foreign(shape=torch.tensor([2**38])),
    }


@pytest.mark.slow
def test_a_kilobyte_that_claims_a_terabyte_is_rejected_in_little_memory(tmp_path):
    slimtensors.save(sample(), tmp_path / "good.safetensors")
    paths = []
    for name, raw in terabytes().items():
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(raw)
        assert len(raw) < 4096 or name == "copies"
    begin = time.monotonic()
    found = dict(
        zip(terabytes(), load_with_limit(paths, tmp_path / "good.safetensors"), strict=True)
    )
    assert time.monotonic() - begin < 60  # a cap against hanging, not a measure of speed
    assert {name: what for name, what in found.items() if not what.startswith("FormatError")} == {}
    assert all(str(path) in what for path, what in zip(paths, found.values(), strict=True))


def test_empty_tensors_with_huge_shapes_are_loaded(path):
    shape = [0, TB]
    path.write_bytes(build_file({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}))
    assert list(slimtensors.load(path)["x"].shape) == shape
