"""Values of the standard library, OmegaConf and Lightning in a state, as tagged JSON.

`describe` and `rebuild` are a fixed table of types: no class is imported by a name from a file.
"""

import argparse
import base64
import datetime
import decimal
import fractions
import io
import pathlib
import sys
import types
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from slimtensors.errors import MissingDependencyError, UnsupportedTensorError
from slimtensors.tensor import Json

TAGS = frozenset(
    {
        *("range", "slice", "path", "uuid", "decimal", "fraction", "bytearray", "bytesio"),
        *("datetime", "date", "time", "timedelta", "timezone", "zoneinfo"),
        *("namespace", "simple_namespace", "dictconfig", "listconfig", "attribute_dict"),
    }
)
"""Keys of the objects that `describe` returns."""

PICKLED_TYPES: list[Any] = [
    *(range, slice, complex, frozenset, bytearray, io.BytesIO, Counter),
    *(decimal.Decimal, fractions.Fraction, uuid.UUID),
    *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(argparse.Namespace, types.SimpleNamespace),
]
"""Types of values that are safe globals for `torch.load(weights_only=True)`."""

_MAX_INLINE = 1 << 16
"""Longer bytes are stored as a tensor: a header of megabytes is slow to read."""
_PATHS: Mapping[str, type[pathlib.PurePath]] = {
    cls.__name__: cls
    for cls in (
        *(pathlib.PosixPath, pathlib.WindowsPath),
        *(pathlib.PurePosixPath, pathlib.PureWindowsPath),
    )
}
_CONFIG_FLAGS = ("readonly", "struct", "allow_objects")
_LIGHTNING = ("lightning.fabric", "lightning_fabric")
"""Packages of Lightning with an `AttributeDict` each."""


class Scope(Protocol):
    """The place of a value in its state."""

    @property
    def path(self) -> str:
        """Path of the value, for messages."""

    def inner(self, part: Any, key: object = None) -> Any:
        """Return JSON for a part of the value; without `key`, it has the path of the value."""

    def items(self, table: Mapping[Any, Any]) -> list[Any]:
        """Return JSON for the keys and values of a table: a list of pairs."""

    def keep(self, x: Tensor) -> str:
        """Store a tensor, and return its name."""

    def reduce(self, cls: type, plain: type) -> None:
        """Report that the value is stored as a `plain` one, without its class."""


def describe(value: Any, scope: Scope) -> Json | None:
    """Return JSON for a value, None if its type is not in the table.

    Types are compared exactly: subclasses may have more state than their base class.
    """
    kind = type(value)
    if kind is range or kind is slice:
        parts = (value.start, value.stop, value.step)
        return {kind.__name__: [scope.inner(part) for part in parts]}
    if kind.__name__ in _PATHS and kind is _PATHS[kind.__name__]:
        return {"path": [kind.__name__, scope.inner(str(value))]}
    if kind is uuid.UUID:
        return {"uuid": value.hex}
    if kind is decimal.Decimal:
        return {"decimal": str(value)}
    if kind is fractions.Fraction:
        return {"fraction": [scope.inner(value.numerator), scope.inner(value.denominator)]}
    if kind is bytes or kind is bytearray:
        return {kind.__name__: _describe_bytes(value, scope)}
    if kind is io.BytesIO:
        if value.closed:
            raise UnsupportedTensorError(f"{scope.path}: cannot store a closed BytesIO")
        return {"bytesio": _describe_bytes(value.getvalue(), scope), "position": value.tell()}
    if kind is argparse.Namespace or kind is types.SimpleNamespace:
        tag = "namespace" if kind is argparse.Namespace else "simple_namespace"
        return {tag: scope.items(vars(value))}
    if type(value).__module__ in ("datetime", "zoneinfo"):
        return _describe_time(value, scope)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if name in ("omegaconf.dictconfig.DictConfig", "omegaconf.listconfig.ListConfig"):
        return _describe_config(value, scope)
    if name in {f"{package}.utilities.data.AttributeDict" for package in _LIGHTNING}:
        return {"attribute_dict": scope.items(value)}
    return None


def rebuild(node: Json, inner: Callable[[Any], Any]) -> Any:
    """Return the value that `describe` was called with; raise ValueError for an unknown tag."""
    match node:
        case {"range": [start, stop, step]}:
            return range(inner(start), inner(stop), inner(step))
        case {"slice": [start, stop, step]}:
            return slice(inner(start), inner(stop), inner(step))
        case {"path": [str(name), str(text)]}:
            return _rebuild_path(name, text)
        case {"uuid": str(text)}:
            return uuid.UUID(hex=text)
        case {"decimal": str(text)}:
            return decimal.Decimal(text)
        case {"fraction": [numerator, denominator]}:
            return fractions.Fraction(inner(numerator), inner(denominator))
        case {"bytes": data}:
            return _rebuild_bytes(data, inner)
        case {"bytearray": data}:
            return bytearray(_rebuild_bytes(data, inner))
        case {"bytesio": data, "position": int(position)}:
            stream = io.BytesIO(_rebuild_bytes(data, inner))
            stream.seek(position)
            return stream
        case {"namespace": list(pairs)}:
            return _fill(argparse.Namespace(), pairs, inner)
        case {"simple_namespace": list(pairs)}:
            return _fill(types.SimpleNamespace(), pairs, inner)
        case {"dictconfig": content}:
            return _rebuild_config(dict, content, node, inner)
        case {"listconfig": content}:
            return _rebuild_config(list, content, node, inner)
        case {"attribute_dict": list(pairs)}:
            return _import_attribute_dict()({inner(key): inner(value) for key, value in pairs})
    return _rebuild_time(node, inner)


def _fill(target: Any, pairs: list[Any], inner: Callable[[Any], Any]) -> Any:
    attributes = {key: inner(value) for key, value in pairs}
    if not all(isinstance(key, str) for key in attributes):
        raise ValueError("names of attributes must be text")
    vars(target).update(attributes)
    return target


def _rebuild_path(name: str, text: str) -> pathlib.PurePath:
    cls = _PATHS[name]
    if not issubclass(cls, pathlib.Path) or isinstance(pathlib.Path(), cls):
        return cls(text)
    return _PATHS[f"Pure{name}"](text)  # of another platform


def _describe_bytes(data: bytes | bytearray, scope: Scope) -> str | Json:
    if len(data) <= _MAX_INLINE:
        return base64.b64encode(data).decode()
    return {"tensor": scope.keep(torch.frombuffer(bytearray(data), dtype=torch.uint8))}


def _rebuild_bytes(data: Any, inner: Callable[[Any], Any]) -> bytes:
    if isinstance(data, str):
        return base64.b64decode(data, validate=True)
    x = inner(data)
    if not isinstance(x, Tensor) or x.dtype is not torch.uint8:
        raise ValueError("bytes must be base64 or a tensor of bytes")
    raw: bytes = x.cpu().numpy().tobytes()
    return raw


def _describe_time(value: Any, scope: Scope) -> Json | None:
    kind = type(value)
    if kind is datetime.datetime or kind is datetime.time:
        node: Json = {kind.__name__: value.replace(tzinfo=None, fold=0).isoformat()}
        if value.fold:
            node["fold"] = 1
        if value.tzinfo is not None:
            node["zone"] = scope.inner(value.tzinfo, "tzinfo")
        return node
    if kind is datetime.date:
        return {"date": value.isoformat()}
    if kind is datetime.timedelta:
        return {"timedelta": [value.days, value.seconds, value.microseconds]}
    if kind is datetime.timezone:
        offset, *name = value.__getinitargs__()
        parts = [offset.days, offset.seconds, offset.microseconds]
        return {"timezone": [*parts, *(scope.inner(text) for text in name)]}
    if kind.__module__ == "zoneinfo" and kind.__name__ == "ZoneInfo" and value.key is not None:
        return {"zoneinfo": value.key}
    return None


def _rebuild_time(node: Json, inner: Callable[[Any], Any]) -> Any:
    match node:
        case {"datetime": str(text)}:
            return _add_zone(datetime.datetime.fromisoformat(text), node, inner)
        case {"time": str(text)}:
            return _add_zone(datetime.time.fromisoformat(text), node, inner)
        case {"date": str(text)}:
            return datetime.date.fromisoformat(text)
        case {"timedelta": [int(days), int(seconds), int(microseconds)]}:
            return datetime.timedelta(days, seconds, microseconds)
        case {"timezone": [int(days), int(seconds), int(microseconds), *name]}:
            return datetime.timezone(datetime.timedelta(days, seconds, microseconds), *name)
        case {"zoneinfo": str(key)}:
            return _find_zone(key)
    raise ValueError(f"unknown type: {str(node)[:80]}")


def _add_zone(value: Any, node: Json, inner: Callable[[Any], Any]) -> Any:
    zone = inner(node.get("zone"))
    if value.tzinfo is not None:
        raise ValueError(f"time zone in a date or time: {str(node)[:80]}")
    return value.replace(tzinfo=zone, fold=node.get("fold", 0))


def _find_zone(key: str) -> datetime.tzinfo:
    import zoneinfo

    zones = _list_zones()
    if not zones:
        raise MissingDependencyError("tzdata")
    if key not in zones:  # ZoneInfo would import a package named after the key
        raise ValueError(f"time zone {key[:80]!r} not found; if it is new, upgrade tzdata")
    return zoneinfo.ZoneInfo(key)


@lru_cache(maxsize=1)  # reads several hundred files
def _list_zones() -> set[str]:
    import zoneinfo

    return zoneinfo.available_timezones()


def _describe_config(value: Any, scope: Scope) -> Json:
    """Describe an OmegaConf container: its items without resolving interpolations, its flags."""
    is_table = type(value).__name__ == "DictConfig"
    plain = dict if is_table else list
    metadata = value._metadata
    if metadata.object_type not in (plain, None):  # a structured config
        scope.reduce(metadata.object_type, type(value))
    if value._is_none() or value._is_missing() or value._is_interpolation():
        content = scope.inner(value._value())
    else:
        keys = list(value.keys()) if is_table else range(len(value))
        nodes = [(key, value._get_node(key)) for key in keys]
        parts = [(key, _unwrap_node(node)) for key, node in nodes]
        if is_table:
            content = scope.items(dict(parts))
        else:
            content = [scope.inner(part, key) for key, part in parts]
    flags = metadata.flags or {}
    chosen = {flag: flags[flag] for flag in _CONFIG_FLAGS if flags.get(flag) is not None}
    return {"dictconfig" if is_table else "listconfig": content, **chosen}


def _unwrap_node(node: Any) -> Any:
    """Return the value of a node, also if it is None, missing or an interpolation."""
    return node if type(node).__name__ in ("DictConfig", "ListConfig") else node._value()


def _rebuild_config(
    plain: type[dict[Any, Any] | list[Any]],
    content: Any,
    node: Json,
    inner: Callable[[Any], Any],
) -> Any:
    try:
        import omegaconf
    except ImportError:
        raise MissingDependencyError("omegaconf") from None
    if isinstance(content, list):
        parts = [[inner(k), inner(v)] for k, v in content] if plain is dict else map(inner, content)
        content = plain(parts)
    elif content is not None and not isinstance(content, str):
        raise ValueError("the content of a config must be a list, text or null")
    cls = omegaconf.DictConfig if plain is dict else omegaconf.ListConfig
    try:
        config = cls(content, flags={"allow_objects": True})
    except omegaconf.errors.OmegaConfBaseException as error:
        raise ValueError(str(error)) from error
    config._set_flag("allow_objects", None)
    for flag in _CONFIG_FLAGS:
        if flag in node:
            config._set_flag(flag, node[flag] is True)
    return config


def _import_attribute_dict() -> Any:
    """Return Lightning's `AttributeDict`, of the package that the program has imported, if any."""
    packages = sorted(_LIGHTNING, key=lambda name: name not in sys.modules)
    for package in packages:
        with suppress(ImportError):
            return import_module(f"{package}.utilities.data").AttributeDict
    raise MissingDependencyError("lightning", "lightning")
