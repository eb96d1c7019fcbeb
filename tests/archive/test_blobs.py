"""Forged blobs with valid checksums."""

import copy
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from forging import DIALECTS, STRANGE, TB, entry, save_sample
from reliability_tools import (
    assert_refused,
    blob,
    blob_file,
    build_file,
    seal_manifest,
    split,
    split_blob,
)
from strategies import same_bits

import slimtensors
from slimtensors import _core
from slimtensors.errors import (
    CorruptFileError,
    FormatError,
    UnknownCodecError,
    UnsupportedVersionError,
)

pytestmark = pytest.mark.hostile

PAYLOAD = bytes([0b00000011] + [0] * 15) + struct.pack("<2f", 1.0, 2.0) + bytes(8)
BLOB = {
    "dtype": "float32",
    "shape": [8],
    "codec": {"name": "bitmask"},
    "parts": {
        "mask": {"dtype": "uint8", "shape": [1], "at": [0, 1]},
        "values": {"dtype": "float32", "shape": [2], "at": [16, 24]},
    },
}


def changed(path: str, value: object) -> dict[str, Any]:
    """Return the header of the blob above with another value at a dotted path; None removes."""
    data = copy.deepcopy(BLOB)
    *way, last = path.split(".")
    table: dict[str, Any] = data
    for key in way:
        table = table[key]
    if value is None:
        del table[last]
    else:
        table[last] = value
    return data


def test_the_unchanged_forged_blob_is_valid(path):
    path.write_bytes(blob_file(blob(BLOB, PAYLOAD)))
    want = torch.tensor([1.0, 2, 0, 0, 0, 0, 0, 0])
    assert same_bits(slimtensors.load(path)["x"], want)


LIES = {
    "a newer version": ({"version": 2}, "", None, UnsupportedVersionError),
    "a version that never was": ({"version": 0}, "", None, FormatError),
    "an unknown codec": ({}, "codec.name", "bitmsk", UnknownCodecError),
    "a codec without name": ({}, "codec", {}, UnknownCodecError),
    "a codec by path": ({}, "codec.name", "os.system", UnknownCodecError),
    "a codec that is text": ({}, "codec", "bitmask", FormatError),
    "no codec": ({}, "codec", None, FormatError),
    "an unknown option": ({}, "codec", {"name": "bitmask", "level": 3}, FormatError),
    "no parts": ({}, "parts", None, FormatError),
    "parts in a list": ({}, "parts", [], FormatError),
    "an empty table of parts": ({}, "parts", {}, FormatError),
    "no mask": ({}, "parts.mask", None, FormatError),
    "no values": ({}, "parts.values", None, FormatError),
    "two parts in one place": (
        {},
        "parts.more",
        {"dtype": "uint8", "shape": [1], "at": [0, 1]},
        FormatError,
    ),
    "a part that is a number": ({}, "parts.mask", 1, FormatError),
    "a part without place": ({}, "parts.mask.at", None, FormatError),
    "a part at one number": ({}, "parts.mask.at", [0], FormatError),
    "a part at three numbers": ({}, "parts.mask.at", [0, 1, 2], FormatError),
    "a part at a fraction": ({}, "parts.mask.at", [0.0, 1.0], FormatError),
    "a part at truth values": ({}, "parts.mask.at", [False, True], FormatError),
    "a part before the start": ({}, "parts.mask.at", [-1, 0], FormatError),
    "a part past the end": ({}, "parts.values.at", [25, 33], FormatError),
    "a part at infinity": ({}, "parts.values.at", [2**64, 2**64 + 8], FormatError),
    "a part that ends before it starts": ({}, "parts.values.at", [24, 16], FormatError),
    "a part of another size": ({}, "parts.values.at", [16, 20], FormatError),
    "a part of another shape": ({}, "parts.values.shape", [3], FormatError),
    "a part of unknown dtype": ({}, "parts.values.dtype", "float31", FormatError),
    "a part of a dtype that is a list": ({}, "parts.values.dtype", [], FormatError),
    "values of another count": (
        {},
        "parts.values",
        {"dtype": "float32", "shape": [1], "at": [16, 20]},
        FormatError,
    ),
    "a mask of another dtype": (
        {},
        "parts.mask",
        {"dtype": "int8", "shape": [1], "at": [0, 1]},
        FormatError,
    ),
    "a mask of another size": (
        {},
        "parts.mask",
        {"dtype": "uint8", "shape": [2], "at": [0, 2]},
        FormatError,
    ),
    "no dtype": ({}, "dtype", None, FormatError),
    "an unknown dtype": ({}, "dtype", "quint8", FormatError),
    "a dtype that is not a name": ({}, "dtype", 7, FormatError),
    "no shape": ({}, "shape", None, FormatError),
    "a negative shape": ({}, "shape", [-8], FormatError),
    "two negative sizes": ({}, "shape", [-2, -4], FormatError),
    "a shape of truth": ({}, "shape", [True, 8], FormatError),
    "a shape of fractions": ({}, "shape", [8.0], FormatError),
    "a larger shape": ({}, "shape", [9], FormatError),
    "an enormous shape": ({}, "shape", [TB], FormatError),
    "a shape past 64 bits": ({}, "shape", [2**33, 2**33], FormatError),
    "a shape of too many sizes": ({}, "shape", [1] * 64 + [8], FormatError),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_forged_blob_is_rejected(path, lie):
    options, where, value, kind = LIES[lie]
    header = changed(where, value) if where else BLOB
    path.write_bytes(blob_file(blob(header, PAYLOAD, **options), name="layers.0.w"))
    assert_refused(path, tensor="layers.0.w", kind=kind)
    assert list(slimtensors.verify(path).damaged) == ["layers.0.w"]


def test_any_shape_of_a_part_loads_or_raises_format_error(path):
    for shape in ([1, 1], [], [1, 1, 1, 1], [1] * 64):
        path.write_bytes(blob_file(blob(changed("parts.mask.shape", shape), PAYLOAD)))
        refused_or_loaded(path)


def refused_or_loaded(path: Path) -> None:
    try:
        slimtensors.load(path, threads=1)
    except FormatError as error:
        assert str(path) in str(error)  # noqa: PT017


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"7", b"null", b"{", b"\xff", b'"x"', b"[" * 10**5],
    ids=lambda t: repr(t[:9]),
)
def test_a_blob_with_a_malformed_header_is_rejected(path, text):
    path.write_bytes(blob_file(blob(text, PAYLOAD)))
    assert_refused(path, tensor="x")


def test_a_blob_with_a_missing_or_wrong_checksum_is_rejected(path):
    for checksum in ("", ',"crc32c":null', ',"crc32c":1', ',"crc32c":"x"', ',"crc32c":[]'):
        text = json.dumps(BLOB)[:-1] + checksum + "}"
        path.write_bytes(blob_file(blob(text.encode(), PAYLOAD)))
        assert_refused(path, tensor="x", kind=CorruptFileError)


def test_a_truncated_blob_is_rejected(path):
    """The manifest marks it as a blob; without one, these would be plain bytes."""
    slimtensors.save({"x": torch.zeros(100)}, path)
    header, data = split(path.read_bytes())
    for size in (0, 1, 15, 16, 17, 100):
        header["x"] = entry(0, size)
        table = json.dumps({"x": header["x"]}, separators=(",", ":"))[1:]
        manifest = json.loads(header["__metadata__"]["slimtensors"])
        manifest["table"] = [len(table), _core.crc32c(table.encode())]
        header["__metadata__"]["slimtensors"] = seal_manifest(manifest)
        path.write_bytes(build_file(header, data[:size]))
        assert_refused(path, tensor="x", kind=CorruptFileError)


@pytest.mark.parametrize("depth", [15, 40, 200, 300, 900, 960, 990, 10_000])
def test_plans_nested_too_deep_are_rejected(path, depth):
    inner = json.dumps({"dtype": "uint8", "shape": [1], "at": [0, 1]})
    start = '{"dtype":"uint8","shape":[1],"codec":{"name":"dense"},"parts":{"data":'
    text = start * depth + inner + "}}" * depth
    text = text[:-1] + f',"crc32c":{_core.crc32c(PAYLOAD)}}}'
    path.write_bytes(blob_file(blob(text.encode(), PAYLOAD)))
    if depth == 15:
        assert slimtensors.load(path)["x"].tolist() == [3]
    else:
        assert_refused(path, tensor="x", kind=FormatError)


def nodes(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every value in JSON data."""
    pairs = (
        data.items()
        if isinstance(data, dict)
        else enumerate(data)
        if isinstance(data, list)
        else ()
    )
    for key, value in pairs:
        yield (*way, key)
        yield from nodes(value, (*way, key))


def replaced(data: Any, way: tuple[Any, ...], value: Any) -> Any:
    data = copy.deepcopy(data)
    inner = data
    for key in way[:-1]:
        inner = inner[key]
    inner[way[-1]] = value
    return data


NUMBERS_AND_OTHERS = [
    *STRANGE[:20],
    [2**62, 4],
    [0, 8],
    [16, 24],
    float("nan"),
    float("inf"),
    "\ud800",
]


@pytest.mark.parametrize("preset", ["bitmask", "bitmask24", "dense"])
def test_any_value_in_a_blob_header_loads_or_raises_format_error(path, preset):
    x = torch.tensor([1.0, 0, 2, 0] * 8, dtype=torch.complex128)
    slimtensors.save({"x": x}, path, preset=preset)
    _, data = split(path.read_bytes())
    header, payload = split_blob(data)
    for way in nodes(header):
        for value in NUMBERS_AND_OTHERS:
            forged = replaced(header, way, value)
            text = (
                json.dumps(forged)
                if way == ("crc32c",)
                else json.dumps({**forged, "crc32c": _core.crc32c(payload)})
            )
            path.write_bytes(blob_file(blob(text.encode(), payload)))
            refused_or_loaded(path)


@DIALECTS
def test_any_value_in_a_manifest_loads_or_raises_format_error(path, dialect):
    raw = save_sample(path, dialect)
    header, data = split(raw)
    manifest = json.loads(header["__metadata__"]["slimtensors"])
    for way in nodes(manifest):
        for value in NUMBERS_AND_OTHERS:
            header["__metadata__"]["slimtensors"] = seal_manifest(replaced(manifest, way, value))
            text = json.dumps(header, separators=(",", ":")).encode()
            path.write_bytes(build_file(text, data))
            refused_or_loaded(path)
