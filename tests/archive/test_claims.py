"""A kilobyte that claims a terabyte."""

import struct
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from forging import TB, foreign
from reliability_tools import (
    assert_refused,
    blob,
    blob_file,
    build_file,
    load_with_limit,
    sample,
)

import slimtensors
from slimtensors.codecs import Bitmask, Dense, Huffman, register
from slimtensors.codecs.plan import chain
from slimtensors.errors import FormatError
from slimtensors.tensor import Parts, Spec, as_bytes, bitwise_equal

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
        "many nodes": many_nodes(),
        "shape part": foreign(shape=torch.tensor([2**20, 2**18])),
        "flat shape part": foreign(shape=torch.tensor([2**38])),
    }


def many_nodes(codec: str = "dense", count: int = 63) -> bytes:
    """Return a file of 16 bytes that claims `count` parts of 96 MB each, which compress well."""
    raw = Huffman().encode(torch.zeros(96 << 20, dtype=torch.uint8))
    payload = bytes(as_bytes(raw["chunks"]).numpy()) + bytes(as_bytes(raw["data"]).numpy())
    middle = as_bytes(raw["chunks"]).numel()

    def node(at: int) -> dict[str, Any]:
        chunks = {"dtype": "uint32", "shape": list(raw["chunks"].shape), "at": [at, at + middle]}
        end = at + len(payload)
        data = {"dtype": "uint8", "shape": [end - at - middle], "at": [at + middle, end]}
        return {
            "dtype": "uint8",
            "shape": [96 << 20],
            "codec": {"name": "huffman"},
            "parts": {"chunks": chunks, "data": data},
        }

    parts: dict[str, Any] = {"data": {"dtype": "uint8", "shape": [16], "at": [0, 16]}}
    parts |= {f"p{i}": node(16 + i * len(payload)) for i in range(count)}
    header = {"dtype": "uint8", "shape": [16], "codec": {"name": codec}, "parts": parts}
    return blob_file(blob(header, bytes(16) + payload * count))


@register
@dataclass(frozen=True)
class Undeclared:
    """A codec of another package, which does not declare its parts."""

    name: ClassVar[str] = "test.undeclared"

    def encode(self, x: torch.Tensor) -> Parts:
        return {"data": as_bytes(x)}

    def decode(self, parts: Parts, like: Spec) -> torch.Tensor:
        return Dense().decode({"data": parts["data"]}, like)


def test_parts_that_a_codec_does_not_read_are_refused(path):
    path.write_bytes(many_nodes(count=1))
    assert "no part 'p0'" in assert_refused(path, tensor="x")
    assert list(slimtensors.verify(path).damaged) == ["x"]
    with pytest.raises(FormatError, match="no part 'p0'"):
        slimtensors.inspect(path)


@pytest.mark.parametrize("count", [1, 63])
def test_all_parts_of_a_tensor_share_one_limit(path, count):
    path.write_bytes(many_nodes("test.undeclared", count))
    assert "too few for a tensor of uint8 [16]" in assert_refused(path, tensor="x")
    assert list(slimtensors.verify(path).damaged) == ["x"]


def test_codecs_that_do_not_declare_their_parts_work(path):
    slimtensors.save({"x": torch.arange(9)}, path, preset=chain(Undeclared(), data=Huffman()))
    assert slimtensors.load(path)["x"].tolist() == list(range(9))


@pytest.mark.parametrize("levels", [1, 15])
def test_a_plan_with_many_large_parts_is_padded_when_written(path, levels):
    """Each level stores all items as nonzero values: the sum is far above the tensor's size."""
    plan = chain(Huffman())
    for _ in range(levels):
        plan = chain(Bitmask(), values=plan)
    x = torch.ones(1 << 20, dtype=torch.uint8)
    slimtensors.save({"x": x}, path, preset=plan)
    assert bitwise_equal(slimtensors.load(path)["x"], x)


def test_an_all_zero_tensor_may_be_as_small_as_the_limit(path):
    x = torch.zeros(64 << 20, dtype=torch.uint8)
    slimtensors.save({"x": x}, path)
    assert path.stat().st_size < 1 << 14
    assert bitwise_equal(slimtensors.load(path)["x"], x)


@pytest.mark.slow
def test_a_kilobyte_that_claims_a_terabyte_is_rejected_in_little_memory(tmp_path):
    slimtensors.save(sample(), tmp_path / "good.safetensors")
    paths = []
    for name, raw in terabytes().items():
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(raw)
        assert len(raw) < 4096 or name in ("copies", "many nodes")
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
