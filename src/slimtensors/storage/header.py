"""The header of a safetensors file: tensors, their byte ranges, and metadata."""

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
"""Maximum size of a header that safetensors readers accept."""

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
_PACKED_PAIR = _DTYPES.get("F4")
"""A dtype with two numbers per item: safetensors counts the numbers, torch the items."""


@dataclass(frozen=True, slots=True)
class HeaderEntry:
    """A stored tensor: its spec, and its byte range after the header."""

    spec: Spec
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Header:
    """All entries of a file in the stored order, and its metadata."""

    entries: dict[str, HeaderEntry]
    metadata: dict[str, str]
    size: int
    """Bytes before the first tensor."""


def has_code(spec: Spec) -> bool:
    """Return True if safetensors supports the dtype and shape."""
    return spec.dtype in _TO_CODE and not (spec.dtype == _PACKED_PAIR and not spec.shape)


def table_text(entries: Mapping[str, HeaderEntry]) -> str:
    """Return the JSON text of the tensors, without the opening brace."""
    table = {
        name: {
            "dtype": _TO_CODE[entry.spec.dtype],
            "shape": _stored_shape(entry.spec),
            "data_offsets": [entry.begin, entry.end],
        }
        for name, entry in entries.items()
    }
    return json.dumps(table, separators=(",", ":"), ensure_ascii=False)[1:]


def pack(table: str, metadata: Mapping[str, str], *, size: int = 0) -> bytes:
    """Return the bytes of a header, padded with spaces to `size` bytes if it is shorter."""
    start = json.dumps({"__metadata__": dict(metadata)}, separators=(",", ":"))
    comma = "," if len(table) > 1 else ""
    text = (start[:-1] + comma + table).encode()
    width = max(size - 8, math.ceil(len(text) / 8) * 8)
    if width > LIMIT:
        raise FormatError(f"header of {width} bytes exceeds the limit of {LIMIT}; use more shards")
    return struct.pack("<Q", width) + text.ljust(width)


def check_name(name: str) -> None:
    """Raise `UnsupportedTensorError` if a stored tensor cannot have this name."""
    if name == "__metadata__":
        raise UnsupportedTensorError("tensor name '__metadata__' is reserved")
    if not is_valid_text(name):
        raise UnsupportedTensorError(f"tensor name is not valid Unicode: {name!r}")


def unpack_size(start: bytes, available: int) -> int:
    """Return the size of the header from the first 8 bytes of a file of `available` bytes."""
    if len(start) < 8:
        raise CorruptFileError(f"truncated: {available} bytes are too few for a safetensors file")
    (width,) = struct.unpack_from("<Q", start)
    if width > LIMIT:
        is_pickle = start.startswith((b"PK", b"\x80\x02"))  # a zip file, or a bare pickle
        hint = "probably a torch.save file" if is_pickle else f"header of {width} bytes"
        raise FormatError(f"not a safetensors file ({hint})")
    if 8 + width > available:
        raise CorruptFileError(f"truncated: header of {width} bytes in a file of {available} bytes")
    return 8 + int(width)


def unpack(raw: bytes, available: int) -> Header:
    """Parse a header and check it against the size of the file."""
    try:
        table = json.loads(raw[8:].decode(), object_pairs_hook=_reject_duplicates)
    except FormatError:
        raise
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"the header is not valid JSON: {error}") from error
    if not isinstance(table, dict):
        raise CorruptFileError("the header is not a JSON object")
    metadata = table.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CorruptFileError("__metadata__ in the header is not a JSON object of strings")
    try:
        "".join(table).encode()
    except UnicodeEncodeError as error:
        raise CorruptFileError(f"a tensor name is not valid Unicode: {error}") from error
    entries = {name: _parse_entry(name, data) for name, data in table.items()}
    _check_tiling(entries, available - len(raw))
    return Header(entries, metadata, len(raw))


def _parse_entry(name: str, data: Any) -> HeaderEntry:
    try:
        code, sizes, (begin, end) = data["dtype"], data["shape"], data["data_offsets"]
        dtype = _DTYPES[code]
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{name}: invalid header entry: {str(data)[:120]}") from error
    if type(begin) is not int or type(end) is not int or not 0 <= begin <= end:
        raise CorruptFileError(f"{name}: invalid offsets {str(data['data_offsets'])[:80]}")
    try:
        shape = parse_shape(sizes)
    except FormatError as error:
        raise CorruptFileError(f"{name}: {error}") from error
    if dtype == _PACKED_PAIR:
        if not shape or shape[-1] % 2:
            raise CorruptFileError(f"{name}: odd number of 4-bit items in a row")
        shape = (*shape[:-1], shape[-1] // 2)
    spec = Spec(dtype, shape)
    if spec.nbytes != end - begin:
        raise CorruptFileError(
            f"{name}: expected {spec.nbytes} bytes for its shape, got {end - begin}"
        )
    return HeaderEntry(spec, begin, end)


def _check_tiling(entries: Mapping[str, HeaderEntry], available: int) -> None:
    """Raise unless the tensors cover the data exactly, without gaps or overlaps."""
    expected = 0
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
        if entry.begin != expected:
            problem = "overlaps its neighbour" if entry.begin < expected else "leaves a gap"
            raise CorruptFileError(f"{name}: {problem}: starts at {entry.begin}, not {expected}")
        expected = entry.end
    if expected != available:
        problem = "truncated" if expected > available else "bytes that belong to no tensor"
        raise CorruptFileError(f"{problem}: expected {expected} bytes of data, got {available}")


def _reject_duplicates(pairs: list[tuple[str, Any]]) -> Json:
    table = dict(pairs)
    if len(table) != len(pairs):
        (name, _), *_ = Counter(name for name, _ in pairs).most_common(1)
        raise CorruptFileError(f"{name}: duplicate name in the header")
    return table


def _stored_shape(spec: Spec) -> list[int]:
    if spec.dtype == _PACKED_PAIR:
        return [*spec.shape[:-1], spec.shape[-1] * 2]
    return list(spec.shape)
