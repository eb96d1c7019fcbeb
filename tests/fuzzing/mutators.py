"""Mutations of JSON data and of bytes; files that are sealed again after a mutation."""

import json
from collections.abc import Iterator
from random import Random
from typing import Any

from reliability_tools import build_file, seal_manifest

from slimtensors import _core

_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    3,
    255,
    2**31 - 1,
    2**31,
    2**32,
    2**62,
    2**63 - 1,
    2**63,
    2**64,
    -(2**63),
    10**40,
    10**400,
    0.0,
    -0.0,
    0.5,
    1e300,
    -1e300,
    float("nan"),
    float("inf"),
    float("-inf"),
    "",
    "x",
    "0",
    "nan",
    "\0",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "é",
    "..",
    "../x",
    "/etc/passwd",
    "a/b",
    "1" * 5000,  # `_LONG_NUMBER`
    "x" * 1000,
    "float32",
    "int8",
    "uint8",
    "qint8",
    "complex128",
    "float4_e2m1fn_x2",
    "bitmask",
    "huffman",
    "dense",
    "whole",
    "same",
    [],
    {},
    [0],
    [0, 0],
    [1, 1],
    [-1, 1],
    [2**40],
    [2**31, 2**31],
    [2**62, 4],
    [1] * 70,
    [None],
    [[]],
    [{}],
    {"": 0},
    {"x": {"x": 0}},
]


_LONG_NUMBER = "1" * 5000
"""Becomes a number in JSON text: Python refuses to parse integers of more than 4300 digits."""


def list_places(data: Any, depth: int = 40) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key) of every value in JSON data, down to some depth."""
    if not isinstance(data, dict | list) or not depth:
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield data, key
        yield from list_places(value, depth - 1)


def mutate_json(random: Random, data: Any) -> Any:
    """Return JSON data with one to three changes; `data` is changed in place."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        places = list(list_places(data))
        if not places:
            return _choose_value(random)
        container, key = random.choice(places)
        match random.randrange(10):
            case 0:
                del container[key]
            case 1:
                other, place = random.choice(places)
                container[key] = _copy(other[place])
            case 2 | 3 | 4:
                container[key] = _change_value(random, container[key])
            case 5:
                _add(random, container, key)
            case 6:
                container[key] = _nest(container[key], random.choice((1, 2, 20, 400, 3000)))
            case _:
                container[key] = _choose_value(random)
    return data


def _choose_value(random: Random) -> Any:
    return _copy(random.choice(_VALUES))


def _copy(value: Any, depth: int = 40) -> Any:
    """Return a copy, without what is nested more deeply: values must not contain themselves."""
    if isinstance(value, list):
        return [_copy(part, depth - 1) for part in value] if depth else []
    if isinstance(value, dict):
        return {key: _copy(part, depth - 1) for key, part in value.items()} if depth else {}
    return value


def _change_value(random: Random, value: Any) -> Any:
    if type(value) is int:
        return random.choice(
            (value + 1, value - 1, 2 * value, -value, value ^ 1 << random.randrange(40), value + 16)
        )
    if type(value) is float:
        return random.choice((-value, value * 2, value + 1, 1e308 * 10))
    if isinstance(value, str) and value:
        i = random.randrange(len(value))
        return random.choice(
            (value[:i], value[:i] + chr(random.randrange(1, 300)) + value[i + 1 :])
        )
    if isinstance(value, list) and value:
        return random.choice((value[:-1], [*value, value[-1]], value[::-1], value * 2))
    return _choose_value(random)


def _add(random: Random, container: Any, key: Any) -> None:
    if isinstance(container, list):
        container.insert(key, container[key])
        return
    names = ("x", "version", "codec", "parts", "at", "crc32c", "shape", "base", "", "data")
    new = random.choice((f"{key}x", *names))
    container[new] = container.pop(key) if random.random() < 0.3 else _choose_value(random)


def _nest(value: Any, depth: int) -> Any:
    for i in range(depth):
        value = [value] if i % 2 else {"x": value}
    return value


def mutate_bytes(random: Random, raw: bytes) -> bytes:
    """Return bytes with one to four changes: bits, words, truncation, insertion, copies."""
    changed = bytearray(raw)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        at = random.randrange(len(changed) + 1)
        match random.randrange(6):
            case 0 | 1 if at < len(changed):
                changed[at] ^= 1 << random.randrange(8)
            case 2:
                changed[at : at + 4] = random.choice((b"\0" * 4, b"\xff" * 4, b"\x7f\xff\xff\x7f"))
            case 3:
                del changed[at : at + random.choice((1, 8, 64, 10**6))]
            case 4:
                changed[at:at] = random.randbytes(random.choice((1, 8, 16)))
            case _:
                other = random.randrange(len(changed) + 1)
                changed[at : at + 8] = changed[other : other + 8]
    return bytes(changed)


def dump_json(data: Any) -> bytes:
    """Return JSON text, or text that is not JSON for data that is nested too deeply for Python."""
    try:
        text = json.dumps(data, separators=(",", ":"))
        return text.replace(f'"{_LONG_NUMBER}"', _LONG_NUMBER).encode()
    except RecursionError:
        return b'{"x":' * 100_000


def seal_file(entries: dict[str, Any], data: bytes, manifest: dict[str, Any]) -> bytes:
    """Return a file whose manifest has the checksums of these entries and of their bytes."""
    table = json.dumps(entries, separators=(",", ":"), ensure_ascii=False)[1:]
    sums = [
        None if old is None else _core.crc32c(data[slice(*entry["data_offsets"])])
        for old, entry in zip(manifest["checksums"], entries.values(), strict=True)
    ]
    table_seal = [len(table.encode()), _core.crc32c(table.encode())]
    sealed = seal_manifest({**manifest, "checksums": sums, "table": table_seal})
    head = {"__metadata__": {"format": "pt", "slimtensors": sealed}}
    text = json.dumps(head, separators=(",", ":"), ensure_ascii=False)[:-1]
    return build_file(f"{text},{table}".encode(), data)
