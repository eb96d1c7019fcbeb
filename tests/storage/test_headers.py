"""Malformed headers."""

import json
import struct

import pytest
from forging import EIGHT, STRANGE, TB, X, entry
from reliability_tools import assert_refused, build_file

import slimtensors
from slimtensors.errors import CorruptFileError

pytestmark = pytest.mark.hostile


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_every_strange_field_of_a_header_is_refused(path, key):
    valid = [value for value in STRANGE if value == X[key] and type(value) is type(X[key])]
    for value in STRANGE:
        if value in valid:
            continue
        path.write_bytes(
            build_file(
                {"good": {**X, "shape": [0], "data_offsets": [0, 0]}, "x": {**X, key: value}}, EIGHT
            )
        )
        assert_refused(path, tensor="x", kind=CorruptFileError)
    path.write_bytes(build_file({"x": {k: v for k, v in X.items() if k != key}}, EIGHT))
    assert_refused(path, tensor="x", kind=CorruptFileError)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_an_invalid_entry_is_refused(path, value):
    path.write_bytes(build_file({"x": value}, EIGHT))
    assert_refused(path, tensor="x", kind=CorruptFileError)


@pytest.mark.parametrize("value", STRANGE, ids=repr)
def test_a_header_that_is_not_an_object_is_refused(path, value):
    if isinstance(value, dict):
        path.write_bytes(build_file(value, EIGHT))
    else:
        path.write_bytes(build_file(value))
    assert_refused(path, kind=CorruptFileError)


@pytest.mark.parametrize(
    "metadata",
    [True, 1, 2.5, "text", ["a"], {"k": 1}, {"k": None}, {"k": {}}, {"k": ["v"]}],
    ids=repr,
)
def test_metadata_that_is_not_an_object_of_strings_is_refused(path, metadata):
    path.write_bytes(build_file({"__metadata__": metadata, "x": X}, EIGHT))
    assert "__metadata__" in assert_refused(path, kind=CorruptFileError)


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
        ([(0, 8), (8, 2**62)], "invalid shape|shape too large|truncated"),
        ([(0, 8), (8, 2**57)], "truncated"),
    ],
)
def test_tensors_must_cover_the_data_exactly(path, spans, word):
    path.write_bytes(build_file({f"t{i}": entry(*span) for i, span in enumerate(spans)}, EIGHT))
    message = assert_refused(path, kind=CorruptFileError)
    assert any(one in message for one in word.split("|"))


def test_the_order_of_entries_need_not_be_that_of_the_data(path):
    path.write_bytes(build_file({"b": entry(3, 8), "none": entry(3, 3), "a": entry(0, 3)}, EIGHT))
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
    assert_refused(path)


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
    path.write_bytes(build_file(text))
    assert_refused(path, kind=CorruptFileError)


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
    path.write_bytes(build_file(text.encode(), EIGHT))
    assert "twice" in assert_refused(path)


def test_names_that_only_look_alike_are_two_names(path):
    zero = json.dumps(entry(8, 8))
    path.write_bytes(
        build_file(
            f'{{"x":{GOOD},"\\\\u0078":{zero},"\\"x\\"":{zero},"dtype":{zero}}}'.encode(), EIGHT
        )
    )
    assert list(slimtensors.load(path)) == ["x", "\\u0078", '"x"', "dtype"]


def test_a_name_that_is_not_unicode_is_refused(path):
    path.write_bytes(build_file(f'{{"x\\ud800":{GOOD}}}'.encode(), EIGHT))
    assert_refused(path)


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_deeply_nested_headers_are_refused(path, key):
    for depth in range(940, 1001):  # around the recursion limit of Python
        fields = {name: json.dumps(value) for name, value in X.items()} | {key: nested(depth)}
        text = ",".join(f'"{name}":{value}' for name, value in fields.items())
        path.write_bytes(build_file(f'{{"x":{{{text}}}}}'.encode(), EIGHT))
        assert_refused(path)
        path.write_bytes(build_file(f'{{"x":{nested(depth)}}}'.encode(), EIGHT))
        assert_refused(path)


@pytest.mark.parametrize(
    "text", [nested(10**5), "[" * 10**6, '{"x":' * 10**5], ids=["lists", "open", "tables"]
)
def test_endlessly_nested_headers_are_refused(path, text):
    path.write_bytes(build_file(text.encode()))
    assert_refused(path)
