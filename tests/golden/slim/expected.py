"""The content of golden files as JSON that every program can compare: no part of the library."""

import argparse
import datetime
import decimal
import fractions
import hashlib
import io
import json
import pathlib
import types
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

_INLINE = 128
"""Bytes up to which tensors are written in full, else as SHA-256."""


def describe(value: Any) -> Any:
    """Return JSON that describes a nested state: structure, types and bits."""

    def pairs(table: Mapping[Any, Any]) -> list[Any]:
        return [[describe(k), describe(v)] for k, v in table.items()]

    kind = type(value).__name__
    match value:
        case torch.Tensor() if value.is_quantized:
            return {"type": "quantized", "value": describe(split_quantized(value))}
        case torch.Tensor():
            kind = "parameter" if isinstance(value, torch.nn.Parameter) else "tensor"
            items = describe_items(kind, str(value.dtype)[6:], value.shape, raw_bytes(value))
            return items | describe_memory(value)
        case np.str_() | np.bytes_():
            return {
                "type": f"numpy {kind}",
                "value": value.item() if kind == "str_" else value.hex(),
            }
        case np.ndarray() | np.generic():
            kind = "array" if isinstance(value, np.ndarray) else "scalar"
            native = value.astype(value.dtype.newbyteorder("="))
            plain = native.dtype.kind in "biufc"
            dtype = native.dtype.name if plain else "int64"
            items = describe_items(kind, dtype, value.shape, native.tobytes())
            return items if plain and value.dtype.isnative else items | {"as": value.dtype.str}
        case OrderedDict():
            metadata = getattr(value, "_metadata", None)
            return {"type": kind, "items": pairs(value), "metadata": describe(metadata)}
        case defaultdict():
            factory = value.default_factory and value.default_factory.__name__
            return {"type": kind, "factory": factory, "items": pairs(value)}
        case dict() | Counter():
            return {"type": kind, "items": pairs(value)}
        case deque():
            return {"type": kind, "maxlen": value.maxlen, "items": [describe(v) for v in value]}
        case set() | frozenset():
            return {"type": kind, "items": sorted((describe(v) for v in value), key=json.dumps)}
        case int() if value.bit_length() > 2000:
            return {"type": kind, "value": hex(value)}
        case torch.Size():
            return {"type": "size", "items": list(value)}
        case list() | tuple():
            return {"type": kind, "items": [describe(part) for part in value]}
        case float():
            return {"type": kind, "value": value.hex()}
        case complex():
            return {"type": kind, "value": [value.real.hex(), value.imag.hex()]}
        case bytes() | bytearray():
            return {"type": kind, **describe_bytes(bytes(value))}
        case io.BytesIO():
            content = describe_bytes(value.getvalue())
            return {"type": kind, **content, "position": value.tell()}
        case range() | slice():
            parts = (value.start, value.stop, value.step)
            return {"type": kind, "items": [describe(part) for part in parts]}
        case decimal.Decimal() | fractions.Fraction() | uuid.UUID() | pathlib.PurePath():
            return {"type": kind, "value": str(value)}
        case datetime.date() | datetime.time() | datetime.timedelta() | datetime.tzinfo():
            return {"type": kind, "value": repr(value)}
        case argparse.Namespace() | types.SimpleNamespace():
            return {"type": kind, "items": pairs(vars(value))}
        case torch.dtype():
            return {"type": kind, "value": str(value)[6:]}
        case torch.device():
            return {"type": kind, "value": str(value)}
    if kind in ("DictConfig", "ListConfig"):
        return describe_config(value)
    assert value is None or type(value) in (bool, int, str), value
    return value


def describe_config(value: Any) -> dict[str, Any]:
    """Return JSON that describes a container of OmegaConf: unresolved content and flags."""
    kind, content = type(value).__name__, value._value()
    flags = dict(sorted((value._metadata.flags or {}).items()))
    if content is None or isinstance(content, str):
        return {"type": kind, "value": content, "flags": flags}
    keys = list(value.keys()) if kind == "DictConfig" else range(len(value))
    nodes = [value._get_node(key) for key in keys]
    parts = [
        node if type(node).__name__ in ("DictConfig", "ListConfig") else node._value()
        for node in nodes
    ]
    items = [[describe(key), describe(part)] for key, part in zip(keys, parts, strict=True)]
    return {"type": kind, "items": items, "flags": flags}


def describe_bytes(raw: bytes) -> dict[str, Any]:
    """Return JSON that describes bytes."""
    return {"value": raw.hex()} if len(raw) <= _INLINE else {"sha256": sha256(raw)}


def describe_memory(x: torch.Tensor) -> dict[str, Any]:
    """Return the order of dimensions in memory, if unusual, and `requires_grad`, if set."""
    found: dict[str, Any] = {}
    if not x.is_contiguous():
        found["order"] = sorted(range(x.dim()), key=lambda dim: -x.stride(dim))
        assert x.permute(found["order"]).is_contiguous()
    if x.requires_grad or isinstance(x, torch.nn.Parameter):
        found["requires_grad"] = x.requires_grad
    return found


def describe_items(kind: str, dtype: str, shape: Any, raw: bytes) -> dict[str, Any]:
    """Return JSON that describes a tensor, array or NumPy scalar."""
    content = {"hex": raw.hex()} if len(raw) <= _INLINE else {"sha256": sha256(raw)}
    return {"type": kind, "dtype": dtype, "shape": list(shape), **content}


def sha256(raw: bytes) -> str:
    """Return the SHA-256 in hexadecimal digits."""
    return hashlib.sha256(raw).hexdigest()


def split_quantized(x: torch.Tensor) -> dict[str, Any]:
    """Return dtype, integers, scales and zero points of a quantized tensor of torch."""
    parts = {"dtype": x.dtype, "q": x.int_repr()}
    if x.qscheme() == torch.per_tensor_affine:
        return {**parts, "scale": x.q_scale(), "zero_point": x.q_zero_point()}
    scales, zeros = x.q_per_channel_scales(), x.q_per_channel_zero_points()
    return {**parts, "scale": scales, "zero_point": zeros, "axis": x.q_per_channel_axis()}


def raw_bytes(x: torch.Tensor) -> bytes:
    """Return the bits of a tensor in row-major order."""
    x = x.detach().contiguous()
    if x.dtype is torch.complex128:
        x = torch.view_as_real(x)
    return x.reshape(-1).view(torch.uint8).numpy().tobytes()


def write_expected(value: Any, path: Path) -> None:
    """Write the description of a state."""
    text = json.dumps(describe(value), ensure_ascii=False, separators=(",", ":"))
    path.write_text(f"{text}\n", encoding="utf-8")


def read_expected(path: Path) -> Any:
    """Return the description that `write_expected` wrote."""
    return json.loads(path.read_text(encoding="utf-8"))
