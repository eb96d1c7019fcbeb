"""Damaged and hostile files give `FormatError` kinds that name the file, in little memory.

Nothing here may raise anything else, and nothing may be believed before it was checked.
"""

import copy
import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_tools import (
    blob,
    blob_file,
    joined,
    outcomes,
    plain_file,
    refused,
    sample,
    sealed,
    split,
    split_blob,
    table_of,
    with_manifest,
)
from strategies import bits, same_bits

import slimtensors
from slimtensors import _core
from slimtensors.errors import (
    CorruptFileError,
    FormatError,
    UnknownCodecError,
    UnsupportedVersionError,
)

DIALECTS = pytest.mark.parametrize("dialect", ["slim", "compressed-tensors"])
INDEX = "model.safetensors.index.json"
TB = 1 << 40


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "hostile.safetensors"


def save_sample(path: Path, dialect: str) -> bytes:
    slimtensors.save(sample(), path, dialect=dialect)
    return path.read_bytes()


def outcome(path: Path) -> str:
    """Load a file that may be bad: `loaded` if it gives the sample, or what is wrong with that."""
    try:
        loaded = slimtensors.load(path, threads=1)
    except FormatError as error:
        return "refused" if str(path) in str(error) else f"does not name the file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    want = sample()
    if loaded.keys() != want.keys():
        return f"other names: {list(loaded)}"
    same = all(same_bits(loaded[name], x) for name, x in want.items())
    return "loaded" if same else "other content"


# Damage: every byte and every length of a small archive.


@DIALECTS
def test_a_file_cut_at_any_byte_is_refused(path, dialect):
    raw = save_sample(path, dialect)
    found = {}
    for size in range(len(raw) - 1, -1, -1):
        os.truncate(path, size)
        found[size] = outcome(path)
    assert {size: what for size, what in found.items() if what != "refused"} == {}


@DIALECTS
def test_a_file_with_bytes_at_its_end_is_refused(path, dialect):
    raw = save_sample(path, dialect)
    for extra in (b"\0", b" ", bytes(4096)):
        path.write_bytes(raw + extra)
        assert "belong to no tensor" in refused(path)


@DIALECTS
@pytest.mark.slow
def test_a_flip_of_any_bit_is_noticed(path, dialect):
    """The only bytes that no checksum covers are `"format":"pt"`, which is for other programs.

    A flip there leaves a file that is either refused, or means exactly the same to us.
    """
    raw = save_sample(path, dialect)
    start = raw.index(b'"format":"pt"')
    harmless = range(start, start + len(b'"format":"pt"'))
    wrong = []
    with path.open("r+b", buffering=0) as file:
        for at, byte in enumerate(raw):
            for mask in (*(1 << i for i in range(8)), 0xFF):
                os.pwrite(file.fileno(), bytes([byte ^ mask]), at)
                what = outcome(path)
                if what != "refused" and not (at in harmless and what == "loaded"):
                    wrong.append((at, mask, raw[max(at - 20, 0) : at + 20], what))
            os.pwrite(file.fileno(), raw[at : at + 1], at)
    assert wrong == []
    assert outcome(path) == "loaded"


@DIALECTS
def test_damaged_data_is_blamed_on_the_tensor_that_has_it(path, dialect):
    raw = save_sample(path, dialect)
    header, data = split(raw)
    start = len(raw) - len(data)
    for name, entry in header.items():
        if name == "__metadata__" or entry["data_offsets"][0] == entry["data_offsets"][1]:
            continue
        for at in (entry["data_offsets"][0], entry["data_offsets"][1] - 1):
            broken = bytearray(raw)
            broken[start + at] ^= 0x10
            path.write_bytes(broken)
            owner = name.split(".")[0]
            refused(path, tensor=f": {owner}: ")
            archive = slimtensors.open(path)
            others = [other for other in archive if sample()[other] is not sample()[owner]]
            for other in set(others) - {owner, "again" if owner == "sparse" else owner}:
                assert same_bits(archive.get_tensor(other), sample()[other])


@DIALECTS
def test_verify_lists_every_damaged_tensor_and_only_those(path, dialect):
    raw = save_sample(path, dialect)
    header, data = split(raw)
    for name, entry in header.items():
        if name == "__metadata__" or entry["data_offsets"][0] == entry["data_offsets"][1]:
            continue
        broken = bytearray(raw)
        broken[len(raw) - len(data) + entry["data_offsets"][0]] ^= 1
        path.write_bytes(broken)
        found = slimtensors.verify(path)
        owner = name.split(".")[0]
        assert not found
        assert set(found.damaged) == ({owner, "again"} if owner == "sparse" else {owner}), name


def test_damaged_shards_are_named(tmp_path):
    tensors = {f"t{i}": bits(i, 500, torch.float32, 0.5) for i in range(6)}
    slimtensors.save(tensors, tmp_path, max_shard_size="3kB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 1
    for shard in shards:
        raw = shard.read_bytes()
        (size,) = struct.unpack_from("<Q", raw)
        for cut in (0, 7, 8, 9, 8 + size - 1, 8 + size, 8 + size + 1, len(raw) - 1):
            shard.write_bytes(raw[:cut])
            refused(tmp_path, where=shard)
        shard.write_bytes(raw)
    assert slimtensors.verify(tmp_path)


# Headers that no program writes.

X = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
EIGHT = bytes(range(8))
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


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_every_strange_field_of_a_header_is_refused(path, key):
    valid = [value for value in STRANGE if value == X[key] and type(value) is type(X[key])]
    for value in STRANGE:
        if value in valid:
            continue
        path.write_bytes(
            joined(
                {"good": {**X, "shape": [0], "data_offsets": [0, 0]}, "x": {**X, key: value}}, EIGHT
            )
        )
        refused(path, tensor="x", kind=CorruptFileError)
    path.write_bytes(joined({"x": {k: v for k, v in X.items() if k != key}}, EIGHT))
    refused(path, tensor="x", kind=CorruptFileError)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_an_entry_that_is_no_entry_is_refused(path, value):
    path.write_bytes(joined({"x": value}, EIGHT))
    refused(path, tensor="x", kind=CorruptFileError)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_header_that_is_no_table_is_refused(path, value):
    if isinstance(value, dict):
        path.write_bytes(joined(value, EIGHT))
    else:
        path.write_bytes(joined(value))
    refused(path, kind=CorruptFileError)


@pytest.mark.parametrize(
    "metadata",
    [True, 1, 2.5, "text", ["a"], {"k": 1}, {"k": None}, {"k": {}}, {"k": ["v"]}],
    ids=repr,
)
def test_metadata_that_is_no_table_of_text_is_refused(path, metadata):
    path.write_bytes(joined({"__metadata__": metadata, "x": X}, EIGHT))
    assert "__metadata__" in refused(path, kind=CorruptFileError)


def entry(begin: int, end: int) -> dict[str, Any]:
    return {"dtype": "U8", "shape": [end - begin], "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("spans", "word"),
    [
        ([(0, 6), (4, 8)], "overlaps"),
        ([(0, 8), (0, 8)], "overlaps"),
        ([(0, 8), (2, 4)], "overlaps"),
        ([(0, 4), (4, 8), (3, 4)], "overlaps"),
        ([(0, 3), (4, 8)], "gap"),
        ([(1, 8)], "gap"),
        ([(0, 8), (9, 9)], "gap"),
        ([(0, 7)], "belong to no tensor"),
        ([], "belong to no tensor"),
        ([(0, 9)], "truncated"),
        ([(0, 8), (8, 2**62)], "not a shape|past all memory|truncated"),
        ([(0, 8), (8, 2**57)], "truncated"),
    ],
)
def test_tensors_must_cover_the_data_exactly(path, spans, word):
    path.write_bytes(joined({f"t{i}": entry(*span) for i, span in enumerate(spans)}, EIGHT))
    message = refused(path, kind=CorruptFileError)
    assert any(one in message for one in word.split("|"))


def test_the_order_of_entries_need_not_be_that_of_the_data(path):
    path.write_bytes(joined({"b": entry(3, 8), "none": entry(3, 3), "a": entry(0, 3)}, EIGHT))
    loaded = slimtensors.load(path)
    assert list(loaded) == ["b", "none", "a"]
    assert bytes(loaded["b"].tolist()) == EIGHT[3:]


@pytest.mark.parametrize(
    "length", [0, 1, 7, 8, 100, 10**8, 10**8 + 1, TB, 2**63 - 1, 2**63, 2**64 - 1]
)
@pytest.mark.parametrize("rest", [b"", b"{", b"{}", bytes(50)])
def test_a_header_length_that_is_wrong_is_refused(path, length, rest):
    if length == 2 and rest == b"{}":
        return
    path.write_bytes(struct.pack("<Q", length) + rest)
    refused(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"{",
        b"{]",
        b"{}x",
        b"{'x':1}",
        b'{"x":}',
        b'{"x":1,}',
        b"\xff\xfe{}",
        b"\xef\xbb\xbf{}",
        b'{"\xff":{}}',
        b'{"\xc3\x28":{}}',
        b'{"\xed\xa0\x80":{}}',
        b'{"x":"\xf8\x88\x80\x80\x80"}',
        b'{"x\0":\0}',
        "{}".encode("utf-16"),
        b'{"x":NaN}',
        b'{"x":Infinity}',
        b'{"x":' + b"9" * 5000 + b"}",
        b'{"x":1e999999}',
        b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}',
        b'{"x":{"dtype":"F32","shape":[NaN],"data_offsets":[0,Infinity]}}',
    ],
    ids=repr,
)
def test_a_header_that_is_not_json_in_utf8_is_refused(path, text):
    path.write_bytes(joined(text))
    refused(path, kind=CorruptFileError)


GOOD = json.dumps(X)


@pytest.mark.parametrize(
    "text",
    [
        f'{{"x":{GOOD},"x":{GOOD}}}',
        f'{{"x":{GOOD},"\\u0078":{GOOD}}}',
        f'{{"\\u0078":{GOOD},"x":{GOOD}}}',
        f'{{"x":0,"x":{GOOD}}}',
        f'{{"x":{{}},"x":{GOOD}}}',
        f'{{"x" : "" , "x":{GOOD}}}',
        f'{{"x":{{"a":1}},"x":{GOOD}}}',
        f'{{"x":{{"\\u0064type":1,"sh\\u0061pe":2,"data_offset\\u0073":3}},"x":{GOOD}}}',
        f'{{"y\\\\":0,"y\\\\":{GOOD}}}',
        f'{{"\\"":0,"\\"":{GOOD}}}',
        '{"x":{"dtype":"F64","dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        '{"x":{"dtype":"F32","shape":[1],"shape":[2],"data_offsets":[0,8]}}',
        '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4],"data_offsets":[0,8]}}',
        '{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,4],"data_\\u006fffsets":[0,8]}}',
        f'{{"__metadata__":{{}},"__metadata__":{{}},"x":{GOOD}}}',
        f'{{"__metadata__":{{}},"x":{GOOD},"__metadata_\\u005f":{{}}}}',
        f'{{"__metadata__":{{"k":"1","k":"2"}},"x":{GOOD}}}',
        f'{{"__metadata__":{{"k":"1","\\u006b":"2"}},"x":{GOOD}}}',
    ],
)
def test_a_name_that_occurs_twice_is_refused(path, text):
    path.write_bytes(joined(text.encode(), EIGHT))
    assert "twice" in refused(path)


def test_names_that_only_look_alike_are_two_names(path):
    zero = json.dumps(entry(8, 8))
    path.write_bytes(
        joined(f'{{"x":{GOOD},"\\\\u0078":{zero},"\\"x\\"":{zero},"dtype":{zero}}}'.encode(), EIGHT)
    )
    assert list(slimtensors.load(path)) == ["x", "\\u0078", '"x"', "dtype"]


def test_a_name_that_is_no_text_is_refused(path):
    path.write_bytes(joined(f'{{"x\\ud800":{GOOD}}}'.encode(), EIGHT))
    refused(path)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_deeply_nested_headers_are_refused(path, key):
    for depth in range(940, 1001):  # around the depth at which Python itself gives up
        fields = {name: json.dumps(value) for name, value in X.items()} | {key: nested(depth)}
        text = ",".join(f'"{name}":{value}' for name, value in fields.items())
        path.write_bytes(joined(f'{{"x":{{{text}}}}}'.encode(), EIGHT))
        refused(path)
        path.write_bytes(joined(f'{{"x":{nested(depth)}}}'.encode(), EIGHT))
        refused(path)


@pytest.mark.parametrize(
    "text", [nested(10**5), "[" * 10**6, '{"x":' * 10**5], ids=["lists", "open", "tables"]
)
def test_endlessly_nested_headers_are_refused(path, text):
    path.write_bytes(joined(text.encode()))
    refused(path)


# Compressed tensors with checksums that fit, and nothing else that does.

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


def test_the_forged_blob_itself_is_a_good_one(path):
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
def test_a_blob_that_lies_is_refused(path, lie):
    options, where, value, kind = LIES[lie]
    header = changed(where, value) if where else BLOB
    path.write_bytes(blob_file(blob(header, PAYLOAD, **options), name="layers.0.w"))
    refused(path, tensor="layers.0.w", kind=kind)
    assert list(slimtensors.verify(path).damaged) == ["layers.0.w"]


def test_a_part_may_have_any_shape_without_anything_breaking(path):
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
def test_a_blob_whose_header_is_no_table_is_refused(path, text):
    path.write_bytes(blob_file(blob(text, PAYLOAD)))
    refused(path, tensor="x")


def test_a_blob_whose_checksum_is_missing_or_wrong_is_refused(path):
    for checksum in ("", ',"crc32c":null', ',"crc32c":1', ',"crc32c":"x"', ',"crc32c":[]'):
        text = json.dumps(BLOB)[:-1] + checksum + "}"
        path.write_bytes(blob_file(blob(text.encode(), PAYLOAD)))
        refused(path, tensor="x", kind=CorruptFileError)


def test_a_blob_too_short_for_its_own_start_is_refused(path):
    """A manifest says that it is a blob; without one, these bytes would be just bytes."""
    slimtensors.save({"x": torch.zeros(100)}, path)
    header, data = split(path.read_bytes())
    for size in (0, 1, 15, 16, 17, 100):
        header["x"] = entry(0, size)
        table = json.dumps({"x": header["x"]}, separators=(",", ":"))[1:]
        manifest = json.loads(header["__metadata__"]["slimtensors"])
        manifest["table"] = [len(table), _core.crc32c(table.encode())]
        header["__metadata__"]["slimtensors"] = sealed(manifest)
        path.write_bytes(joined(header, data[:size]))
        refused(path, tensor="x", kind=CorruptFileError)


@pytest.mark.parametrize("depth", [15, 40, 200, 300, 900, 960, 990, 10_000])
def test_plans_that_are_nested_too_deep_are_refused(path, depth):
    inner = json.dumps({"dtype": "uint8", "shape": [1], "at": [0, 1]})
    start = '{"dtype":"uint8","shape":[1],"codec":{"name":"dense"},"parts":{"data":'
    text = start * depth + inner + "}}" * depth
    text = text[:-1] + f',"crc32c":{_core.crc32c(PAYLOAD)}}}'
    path.write_bytes(blob_file(blob(text.encode(), PAYLOAD)))
    if depth == 15:
        assert slimtensors.load(path)["x"].tolist() == [3]
    else:
        refused(path, tensor="x", kind=FormatError)


def nodes(data: Any, way: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the way to every value in JSON data."""
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
def test_any_value_in_a_blob_may_be_anything_and_nothing_breaks(path, preset):
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
def test_any_value_in_a_manifest_may_be_anything_and_nothing_breaks(path, dialect):
    raw = save_sample(path, dialect)
    header, data = split(raw)
    manifest = json.loads(header["__metadata__"]["slimtensors"])
    for way in nodes(manifest):
        for value in NUMBERS_AND_OTHERS:
            header["__metadata__"]["slimtensors"] = sealed(replaced(manifest, way, value))
            text = json.dumps(header, separators=(",", ":")).encode()
            path.write_bytes(joined(text, data))
            refused_or_loaded(path)


# Manifests that lie.


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda m: m.update(version=2), UnsupportedVersionError),
        (lambda m: m.update(version=10**9), UnsupportedVersionError),
        (lambda m: m.update(version=0), FormatError),
        (lambda m: m.update(version=-1), FormatError),
        (lambda m: m.update(version=True), FormatError),
        (lambda m: m.update(version="1"), FormatError),
        (lambda m: m.pop("version"), FormatError),
        (lambda m: m.update(dialect="klingon"), FormatError),
        (lambda m: m.pop("dialect"), FormatError),
        (lambda m: m.pop("checksums"), FormatError),
        (lambda m: m["checksums"].pop(), FormatError),
        (lambda m: m["checksums"].append(0), FormatError),
        (lambda m: m.update(checksums={}), FormatError),
        (lambda m: m.update(checksums=["x"] * len(m["checksums"])), FormatError),
        (lambda m: m.update(checksums=[float("inf")] * len(m["checksums"])), FormatError),
        (lambda m: m.update(checksums=[0] * len(m["checksums"])), FormatError),
        (lambda m: m.pop("table"), FormatError),
        (lambda m: m.update(table=[0, 0]), FormatError),
        (lambda m: m.update(table=[m["table"][0] - 1, m["table"][1]]), FormatError),
        (lambda m: m.update(table=[-5, m["table"][1]]), FormatError),
        (lambda m: m.update(table=[2**70, m["table"][1]]), FormatError),
        (lambda m: m.update(table=[1.5, m["table"][1]]), FormatError),
        (lambda m: m.update(tied={"t": "nowhere"}), FormatError),
        (lambda m: m.update(tied={"t": "t"}), FormatError),
        (lambda m: m.update(tied={"steps": "flags"}), FormatError),
        (lambda m: m.update(tied={"t": 1}), FormatError),
        (lambda m: m.update(tied=["t"]), FormatError),
        (lambda m: m.update(tied="t"), FormatError),
        (lambda m: m.update(plans={"nowhere": "bitmask"}), FormatError),
        (lambda m: m.update(plans={"steps": "bitmask"}), FormatError),
        (lambda m: m.update(plans={"steps": 1}), FormatError),
        (lambda m: m.update(plans=["steps"]), FormatError),
    ],
)
@DIALECTS
def test_a_manifest_that_lies_is_refused(path, dialect, change, kind):
    path.write_bytes(with_manifest(save_sample(path, dialect), change))
    refused(path, kind=kind)


@DIALECTS
def test_names_tied_to_names_that_are_tied_are_refused(path, dialect):
    raw = save_sample(path, dialect)
    path.write_bytes(with_manifest(raw, lambda m: m.update(tied={"b": "a", "a": "b"})))
    refused(path)


def test_an_unknown_codec_in_parts_is_refused_and_named(path):
    raw = save_sample(path, "compressed-tensors")
    path.write_bytes(with_manifest(raw, lambda m: m["plans"].update(sparse="zip")))
    refused(path, tensor="sparse")


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "7", "null", '"x"', "{}", '{"version":1}', "[" * 10**5],
    ids=lambda t: t[:9],
)
def test_a_manifest_that_is_none_is_refused(path, text):
    path.write_bytes(joined({"__metadata__": {"slimtensors": text}, "x": X}, EIGHT))
    refused(path)


def test_a_manifest_with_half_a_character_is_refused(path):
    text = json.dumps({"__metadata__": {"slimtensors": '{"version":1,"\ud800":1}'}, "x": X})
    path.write_bytes(joined(text.encode(), EIGHT))
    refused(path)


@pytest.mark.parametrize("key", ["tied", "plans"])
def test_a_name_in_a_manifest_that_is_no_text_is_refused(path, key):
    header, data = split(save_sample(path, "slim"))
    manifest = json.loads(header["__metadata__"]["slimtensors"])
    manifest[key] = {"x\ud800": "steps"}
    header["__metadata__"]["slimtensors"] = sealed(manifest, ensure_ascii=True)
    path.write_bytes(joined(header, data))
    refused(path)


def test_a_list_of_tensors_that_another_program_changed_is_refused(path):
    header, data = split(save_sample(path, "slim"))
    header["renamed"] = header.pop("steps")
    path.write_bytes(joined(header, data))
    assert "another program" in refused(path, kind=CorruptFileError)


# Parts of compressed-tensors, whoever wrote them.


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


def test_the_forged_parts_themselves_are_good_ones(path):
    path.write_bytes(foreign())
    want = torch.zeros(2, 8)
    want[0, 0], want[1, 7] = 1, 2
    assert same_bits(slimtensors.load(path)["m.weight"], want)


@pytest.mark.parametrize(
    "change",
    [
        {"shape": torch.tensor([2, 9])},
        {"shape": torch.tensor([3, 8])},
        {"shape": torch.tensor([-2, -8])},
        {"shape": torch.tensor([2**40, 2**40])},
        {"shape": torch.tensor([TB])},
        {"shape": torch.tensor([2.0, 8.0])},
        {"shape": torch.tensor([2, 8], dtype=torch.int32)},
        {"shape": torch.tensor([], dtype=torch.int64)},
        {"shape": torch.ones(100, dtype=torch.int64)},
        {"compressed": torch.tensor([1.0])},
        {"compressed": torch.tensor([1.0, 2.0, 3.0])},
        {"compressed": torch.tensor([], dtype=torch.float32)},
        {"bitmask": torch.tensor([[3], [128]], dtype=torch.uint8)},
        {"bitmask": torch.tensor([[1], [-128]], dtype=torch.int8)},
        {"bitmask": torch.tensor([[1]], dtype=torch.uint8)},
        {"bitmask": torch.tensor([], dtype=torch.uint8)},
        {"bitmask": torch.tensor([257.0])},
    ],
    ids=repr,
)
def test_parts_that_do_not_fit_are_refused(path, change):
    path.write_bytes(foreign(**change))
    refused(path, tensor="m.weight")


def test_padding_bits_of_a_mask_that_are_set_are_refused(path):
    parts = {
        "shape": torch.tensor([2, 4]),
        "bitmask": torch.tensor([[0x11], [0]], dtype=torch.uint8),
    }
    path.write_bytes(foreign(**parts))
    refused(path, tensor="m.weight", kind=CorruptFileError)


def test_a_tensor_that_is_there_plain_and_in_parts_is_refused(path):
    path.write_bytes(foreign())
    header, data = split(path.read_bytes())
    header["m.weight"] = {"dtype": "F32", "shape": [0], "data_offsets": [len(data), len(data)]}
    path.write_bytes(joined(header, data))
    refused(path, tensor="m.weight")


def test_a_tensor_in_parts_that_two_shards_claim_is_refused(tmp_path):
    """One shard has a manifest, one has none, and both mean the name `m.weight`."""
    x = torch.zeros(64, 64)
    slimtensors.save({"m.weight": x}, tmp_path / "a.safetensors", dialect="compressed-tensors")
    raw = foreign()
    header, data = split(raw)
    names = {key: key.replace("m.weight.", "m.") for key in header}
    (tmp_path / "b.safetensors").write_bytes(joined({names[k]: v for k, v in header.items()}, data))
    write_index_of(tmp_path, "a.safetensors", "b.safetensors")
    refused(tmp_path / INDEX, tensor="m.weight", where=tmp_path)


def test_parts_that_a_manifest_of_another_shard_claims_are_refused(tmp_path):
    slimtensors.save({"y": torch.ones(2)}, tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    raw = with_manifest(raw, lambda m: m.update(plans={"m.weight": "bitmask"}))
    (tmp_path / "a.safetensors").write_bytes(raw)
    (tmp_path / "b.safetensors").write_bytes(foreign())
    write_index_of(tmp_path, "a.safetensors", "b.safetensors")
    refused(tmp_path / INDEX, where=tmp_path)


# Indexes.


def write_index(folder: Path, weight_map: object) -> None:
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def write_index_of(folder: Path, *shards: str) -> None:
    write_index(folder, {name: shard for shard in shards for name in table_of(folder / shard)})


@pytest.fixture
def secret(tmp_path) -> Path:
    """Return a good file outside of the model's folder."""
    (tmp_path / "model").mkdir()
    slimtensors.save(sample(), tmp_path / "secret.safetensors")
    return tmp_path / "secret.safetensors"


TRICKS = [
    "{secret}",
    "../secret.safetensors",
    "a/../../secret.safetensors",
    "./../secret.safetensors",
    "..",
    "..\\secret.safetensors",
    "C:\\secret.safetensors",
    "C:secret.safetensors",
    "\\\\server\\share\\secret.safetensors",
    "file://{secret}",
    "file:{secret}",
    "memory://secret.safetensors",
    "s3://bucket/secret.safetensors",
    "https://127.0.0.1/secret.safetensors",
    "//{secret}",
    "",
    ".",
    "./",
    "/",
    "\0",
    "model.safetensors\0.json",
    "~root\0",
    None,
    True,
    7,
    1.5,
    [],
    ["a.safetensors"],
    {},
    {"a": "b"},
    "\ud800.safetensors",
]


@pytest.mark.parametrize("trick", TRICKS, ids=repr)
def test_no_name_in_an_index_leads_out_of_its_folder(secret, trick):
    folder = secret.parent / "model"
    (folder / "a").mkdir()
    name = trick.format(secret=secret) if isinstance(trick, str) else trick
    write_index(folder, {"x": name})
    refused(folder, where=folder / INDEX)
    refused(folder / INDEX)


@pytest.mark.parametrize("weight_map", [None, True, 7, "text", [], ["a.safetensors"], {}], ids=repr)
def test_a_weight_map_that_is_none_is_refused(tmp_path, weight_map):
    write_index(tmp_path, weight_map)
    refused(tmp_path / INDEX)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "7",
        "{}",
        "\ufeff{}",
        "[" * 10**5,
        '{"weight_map":' * 10**5,
        "9" * 5000,
    ],
    ids=lambda t: t[:9],
)
def test_an_index_that_is_none_is_refused(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    refused(tmp_path / INDEX)


def test_an_index_in_bad_utf8_is_refused(tmp_path):
    (tmp_path / INDEX).write_bytes(b'{"weight_map":{"x":"\xff"}}')
    refused(tmp_path / INDEX)


def test_a_shard_that_is_missing_is_named(tmp_path):
    slimtensors.save(sample(), tmp_path / "a.safetensors")
    write_index(tmp_path, {"steps": "a.safetensors", "y": "gone.safetensors"})
    with pytest.raises(FileNotFoundError, match=r"gone\.safetensors"):
        slimtensors.load(tmp_path)


def test_a_shard_that_is_a_folder_is_named(tmp_path):
    (tmp_path / "sub").mkdir()
    write_index(tmp_path, {"x": "sub"})
    with pytest.raises((FormatError, OSError), match="sub"):
        slimtensors.load(tmp_path)


def test_a_name_in_two_shards_is_refused(tmp_path):
    for shard in ("a", "b"):
        slimtensors.save(
            {"x": torch.ones(2), shard: torch.ones(1)}, tmp_path / f"{shard}.safetensors"
        )
    write_index(tmp_path, {"x": "a.safetensors", "b": "b.safetensors"})
    refused(tmp_path, tensor="x", where=tmp_path / "b.safetensors")


def test_a_name_tied_in_one_shard_and_stored_in_another_is_refused(tmp_path):
    x = torch.ones(2)
    slimtensors.save({"x": x, "y": x}, tmp_path / "a.safetensors")
    slimtensors.save({"y": torch.zeros(2)}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    refused(tmp_path, tensor="y", where=tmp_path)


def test_a_tensor_that_the_index_promises_must_be_in_its_shard(tmp_path):
    """A shard of another model in the right place must not pass for a model with fewer tensors."""
    slimtensors.save(
        {f"t{i}": torch.ones(100) * i for i in range(8)},
        tmp_path,
        preset="dense",
        max_shard_size="1kB",
    )
    shards = sorted(tmp_path.glob("*.safetensors"))
    slimtensors.save({"other": torch.ones(5)}, shards[1])
    refused(tmp_path, where=tmp_path)


# A kilobyte that claims a terabyte.


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
        "offsets": joined({"x": items}, bytes(900)),
        "shape": joined({"x": {**items, "data_offsets": [0, 8]}}, bytes(8)),
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
def test_a_kilobyte_that_claims_a_terabyte_is_refused_in_little_memory(tmp_path):
    slimtensors.save(sample(), tmp_path / "good.safetensors")
    paths = []
    for name, raw in terabytes().items():
        paths.append(tmp_path / f"{name}.safetensors")
        paths[-1].write_bytes(raw)
        assert len(raw) < 4096 or name == "copies"
    begin = time.monotonic()
    found = dict(zip(terabytes(), outcomes(paths, tmp_path / "good.safetensors"), strict=True))
    assert time.monotonic() - begin < 60  # a cap against hanging, not a measure of speed
    assert {name: what for name, what in found.items() if not what.startswith("FormatError")} == {}
    assert all(str(path) in what for path, what in zip(paths, found.values(), strict=True))


def test_zero_times_a_terabyte_is_nothing(path):
    shape = [0, TB]
    path.write_bytes(joined({"x": {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]}}))
    assert list(slimtensors.load(path)["x"].shape) == shape
