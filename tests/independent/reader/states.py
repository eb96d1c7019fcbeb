"""States: values that are not tensors (docs/format.md)."""

import argparse
import base64
import datetime
import decimal
import fractions
import io
import pathlib
import types
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """A value that only torch, NumPy or OmegaConf has, by the key that the tree uses for it."""

    kind: str
    value: object
    fields: dict = field(default_factory=dict)
    """Further keys: `requires_grad`, `order`, `dtype`, or the flags of a config."""


class Ordered(OrderedDict):
    """An `OrderedDict` with the metadata of `nn.Module.state_dict()`."""

    metadata = None


class AttributeDict(dict):
    """An `AttributeDict` of Lightning."""


_FACTORIES = {kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)}


def build_state(node, tensors):
    """Return the value that a node of the tree describes."""
    if not isinstance(node, dict):
        return node

    def inner(part):
        return build_state(part, tensors)

    match node:
        case {"tensor": name, **fields} if not fields:
            return tensors[name]
        case {"tensor": name, **fields}:
            return Value("tensor", tensors[name], fields)
        case {"parameter": name, **fields}:
            return Value("parameter", tensors[name], fields)
        case {"array": name, **fields}:
            return Value("array", tensors[name], fields)
        case {"scalar": name, **fields}:
            return Value("scalar", tensors[name], fields)
        case {"numpy_str": text}:
            return Value("numpy_str", text)
        case {"numpy_bytes": text}:
            return Value("numpy_bytes", base64.b64decode(text, validate=True))
        case {"dict": pairs}:
            return {inner(key): inner(value) for key, value in pairs}
        case {"counter": pairs}:
            return Counter({inner(key): inner(value) for key, value in pairs})
        case {"ordered": pairs}:
            table = Ordered((inner(key), inner(value)) for key, value in pairs)
            table.metadata = inner(node.get("metadata"))
            return table
        case {"defaultdict": [factory, pairs]}:
            table = defaultdict(_FACTORIES[factory] if factory else None)
            table.update((inner(key), inner(value)) for key, value in pairs)
            return table
        case {"deque": parts}:
            return deque((inner(part) for part in parts), node.get("maxlen"))
        case {"set": parts}:
            return {inner(part) for part in parts}
        case {"frozenset": parts}:
            return frozenset(inner(part) for part in parts)
        case {"int": text}:
            return int(text, 16)
        case {"list": parts}:
            return [inner(part) for part in parts]
        case {"tuple": parts}:
            return tuple(inner(part) for part in parts)
        case {"dtype": name}:
            return Value("dtype", name)
        case {"device": name}:
            return Value("device", name)
        case {"size": sizes}:
            return Value("size", tuple(sizes))
        case {"float": text}:
            return float(text)
        case {"complex": [real, imaginary]}:
            return complex(inner(real), inner(imaginary))
    return build_value(node, inner)


def build_value(node, inner):
    """Return a value of the standard library, or of OmegaConf or Lightning."""
    match node:
        case {"bytes": data}:
            return build_bytes(data, inner)
        case {"bytearray": data}:
            return bytearray(build_bytes(data, inner))
        case {"bytesio": data, "position": position}:
            stream = io.BytesIO(build_bytes(data, inner))
            stream.seek(position)
            return stream
        case {"range": parts}:
            return range(*map(inner, parts))
        case {"slice": parts}:
            return slice(*map(inner, parts))
        case {"fraction": [numerator, denominator]}:
            return fractions.Fraction(inner(numerator), inner(denominator))
        case {"decimal": text}:
            return decimal.Decimal(text)
        case {"uuid": text}:
            return uuid.UUID(text)
        case {"path": [name, text]}:
            return getattr(pathlib, f"Pure{name.removeprefix('Pure')}")(text)
        case {"datetime": text}:
            zone, fold = inner(node.get("zone")), node.get("fold", 0)
            return datetime.datetime.fromisoformat(text).replace(tzinfo=zone, fold=fold)
        case {"time": text}:
            zone, fold = inner(node.get("zone")), node.get("fold", 0)
            return datetime.time.fromisoformat(text).replace(tzinfo=zone, fold=fold)
        case {"date": text}:
            return datetime.date.fromisoformat(text)
        case {"timedelta": parts}:
            return datetime.timedelta(*parts)
        case {"timezone": [days, seconds, microseconds, *name]}:
            return datetime.timezone(datetime.timedelta(days, seconds, microseconds), *name)
        case {"zoneinfo": key}:
            return zoneinfo.ZoneInfo(key)
        case {"namespace": pairs}:
            return argparse.Namespace(**{name: inner(value) for name, value in pairs})
        case {"simple_namespace": pairs}:
            found = types.SimpleNamespace()
            vars(found).update((name, inner(value)) for name, value in pairs)
            return found
        case {"dictconfig": content, **flags}:
            if isinstance(content, list):
                content = [[inner(key), inner(value)] for key, value in content]
            return Value("DictConfig", content, flags)
        case {"listconfig": content, **flags}:
            if isinstance(content, list):
                content = [[i, inner(value)] for i, value in enumerate(content)]
            return Value("ListConfig", content, flags)
        case {"attribute_dict": pairs}:
            return AttributeDict((inner(key), inner(value)) for key, value in pairs)
    raise AssertionError(f"unknown type: {list(node)}")


def build_bytes(data, inner):
    """Return bytes that are stored as base64 or as a tensor."""
    return base64.b64decode(data, validate=True) if isinstance(data, str) else inner(data).data
