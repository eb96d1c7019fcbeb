"""The header of a safetensors file: which tensors it holds, where, and a few words about them."""

import json
import math
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from slimtensors.errors import CorruptFileError, FormatError, UnsupportedTensorError
from slimtensors.tensor import Json, Spec, is_valid_text, parse_shape

LIMIT = 100_000_000
"""Bytes of the largest header that readers of this format accept."""

_CODES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
_DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name) for code, name in _CODES.items() if hasattr(torch, name)
}
_TO_CODE = {dtype: code for code, dtype in _DTYPES.items()}
_PAIR = _DTYPES.get("F4")
"""Two numbers in an item: safetensors counts the numbers, torch the items."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """One stored tensor: what it is, and where its bytes lie after the header."""

    spec: Spec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """All entries of a file in the order it lists them, and its free text."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    size: int
    """Bytes before the first tensor."""


def has_code(spec: Spec) -> bool:
    """Tell whether safetensors has a name for the dtype (and a way to say the shape)."""
    return spec.dtype in _TO_CODE and not (spec.dtype == _PAIR and not spec.shape)


def table_text(entries: Mapping[str, HeaderEntry]) -> str:
    """Return the part of a header that lists the tensors, up to its last brace."""
    table = {
        name: {
            "dtype": _TO_CODE[entry.spec.dtype],
            "shape": _numbers(entry.spec),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in entries.items()
    }
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False)[1:]


def pack(table: str, metadata: Mapping[str, str], *, size: int = 0) -> bytes:
    """Return the bytes of a header, filled with spaces to `size` bytes if it is shorter."""
    words = json.dumps({"__metadata__": dict(metadata)}, separators=(",", ":"))
    comma = "," if len(table) > 1 else ""
    text = (words[:-1] + comma + table).encode()
    width = max(size - 8, math.ceil(len(text) / 8) * 8)
    if width > LIMIT:
        raise FormatError(f"a header of {width} bytes; readers accept {LIMIT}: use more shards")
    return struct.pack("<Q", width) + text.ljust(width)


def check_name(name: str) -> None:
    """Raise unless `name` can be the name of a stored tensor."""
    if name == "__metadata__":
        raise UnsupportedTensorError("a tensor cannot be named '__metadata__' in this format")
    if not is_valid_text(name):
        raise UnsupportedTensorError(f"a tensor's name is not text: {name!r}")


def unpack_size(start: bytes, available: int) -> int:
    """Return the size of the whole header from the first 8 bytes of a file of `available` bytes."""
    if len(start) < 8:
        raise CorruptFileError(f"{available} bytes are too few for a safetensors file")
    (width,) = struct.unpack_from("<Q", start)
    if width > LIMIT:
        pickled = start.startswith((b"PK", b"\x80\x02"))  # a zip file, or a pickle itself
        what = "a torch.save file" if pickled else "not a safetensors file"
        raise FormatError(f"a header of {width} bytes; this is probably {what}")
    if 8 + width > available:
        raise CorruptFileError(f"truncated: a header of {width} bytes in a file of {available}")
    return 8 + int(width)


def unpack(raw: bytes, available: int) -> Header:
    """Parse a whole header and check all of it against the size of the file."""
    try:
        table = json.loads(raw[8:].decode(), object_pairs_hook=_unique)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header is not JSON: {error}") from error
    if not isinstance(table, dict):
        raise CorruptFileError("the header is not a table")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFileError("the header's __metadata__ is not a table of text")
    try:
        "".join(table).encode()
    except UnicodeEncodeError as error:
        raise CorruptFileError(f"a name is not text: {error}") from error
    entries = {name: _entry(name, data) for name, data in table.items()}
    _check_tiling(entries, available - len(raw))
    return Header(entries, metadata, len(raw))


def _entry(name: str, data: Any) -> HeaderEntry:
    try:
        code, sizes, (begin, end) = data["dtype"], data["shape"], data["data_offsets"]
        dtype = _DTYPES[code]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{name}: not a tensor: {str(data)[:120]}") from error
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise CorruptFileError(f"{name}: bad offsets {str(data['data_offsets'])[:80]}")
    try:
        shape = parse_shape(sizes)
    except FormatError as error:
        raise CorruptFileError(f"{name}: {error}") from error
    if dtype == _PAIR:
        if not shape or shape[-1] % 2:
            raise CorruptFileError(f"{name}: an odd number of 4-bit items in a row")
        shape = (*shape[:-1], shape[-1] // 2)
    spec = Spec(dtype, shape)
    if spec.nbytes != end - begin:
        raise CorruptFileError(f"{name}: {end - begin} bytes, but its shape needs {spec.nbytes}")
    return HeaderEntry(spec, begin, end)


def _check_tiling(entries: Mapping[str, HeaderEntry], available: int) -> None:
    at = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != at:
            what = "overlaps its neighbour" if entry.begin < at else "leaves a gap"
            raise CorruptFileError(f"{name}: starts at {entry.begin}, not at {at}: it {what}")
        at = entry.end
    if at != available:
        what = "truncated" if at > available else "bytes that belong to no tensor"
        raise CorruptFileError(f"{what}: tensors take {at} bytes, the file has {available}")


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    table = dict(pairs)
    if len(table) != len(pairs):
        (twice, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise CorruptFileError(f"{twice}: the name occurs twice in the header")
    return table


def _numbers(spec: Spec) -> list[int]:
    if spec.dtype == _PAIR:
        return [*spec.shape[:-1], spec.shape[-1] * 2]
    return list(spec.shape)
