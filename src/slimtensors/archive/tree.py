"""Nested states (dicts, tuples, numbers, dtypes) as flat tensors and a JSON outline.

`flatten` extracts the tensors of a state and describes the rest as JSON; `unflatten` rebuilds it.
Nothing is pickled, so loading a file never executes code.
"""

import base64
import json
import logging
import math
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor, nn

from slimtensors.archive import values
from slimtensors.codecs.plan import Encoded
from slimtensors.errors import CorruptFileError, UnsupportedTensorError
from slimtensors.tensor import (
    Json,
    dtype_name,
    find_dtype,
    find_order,
    is_valid_text,
    permuted_strides,
    with_strides,
)

_log = logging.getLogger(__name__)

_MAX_DEPTH = 100
_MAX_JSON_BITS = 2000
"""Larger integers are stored as text: Python limits the decimal digits that it parses."""
_PLAIN = (str, int, bool, type(None))
_TENSORS = (Tensor, Encoded)
_FACTORIES: Mapping[str, Callable[[], Any]] = {
    cls.__name__: cls for cls in (bool, dict, float, int, list, set, str, tuple)
}
"""Default factories of a `defaultdict` that are stored by name."""
_NUMPY_DTYPE = re.compile(r"[<>|][biufc]\d+|[<>][mM]8(\[\d*[A-Za-z]+\])?")


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor | Encoded], Json | None]:
    """Return the tensors of a state by name and an outline of the rest, None if all are tensors.

    The name of a tensor is its path in the state, joined by dots. Tensors may be encoded. Members
    of an Enum and named tuples lose their class, with a warning.
    """
    if all(isinstance(k, str) and isinstance(v, Tensor | Encoded) for k, v in state.items()):
        return dict(state), None
    outliner = _Outliner()
    outline = outliner.describe(state, "", 0)
    for cls, (stored_as, path, *others) in outliner.reduced.items():
        _warn_reduced(path, len(others), f"{cls.__module__}.{cls.__qualname__}", stored_as)
    return outliner.tensors, outline


def unflatten(outline: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that was passed to `flatten`."""
    try:
        return _Rebuilder(tensors).rebuild(outline, 0)
    except (ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"malformed state outline: {repr(error)[:200]}") from error
    except RuntimeError as error:  # of torch, or nested too deeply
        raise CorruptFileError(f"malformed state outline: {repr(error)[:200]}") from error


_VERSION_1 = {
    *("tensor", "array", "scalar", "dict", "ordered", "counter", "list", "tuple"),
    *("dtype", "device", "size", "float", "complex", "bytes"),
}


def outline_version(outline: Json) -> int:
    """Return the lowest format version that describes an outline."""
    version = 1
    pending: list[Any] = [outline]
    while pending:
        node = pending.pop()
        if isinstance(node, list):
            pending += node
        elif isinstance(node, dict):
            pending += node.values()
            if not values.TAGS.isdisjoint(node) or isinstance(node.get("bytes"), dict):
                return 3
            if node.keys() == {"ordered", "metadata"}:
                continue
            if len(node) != 1 or not node.keys() <= _VERSION_1:
                version = 2
    return version


@lru_cache(maxsize=1024)  # once, not at each of a thousand saves
def _warn_reduced(path: str, others: int, cls: str, stored_as: str) -> None:
    more = f" and {others} more" if others else ""
    _log.warning("%s%s: stored as a plain %s, without its class %s", path, more, stored_as, cls)


@dataclass
class _Outliner:
    """Collects the tensors of a state while it is described."""

    tensors: dict[str, Tensor | Encoded] = field(default_factory=dict)
    reduced: dict[type, list[str]] = field(default_factory=dict)
    """Class -> plain type that its values are stored as, then their paths."""

    def describe(self, value: Any, path: str, depth: int) -> Any:
        """Return JSON for `value`: plain if JSON supports it, else an object keyed by its type."""
        kind = type(value)
        if kind in _PLAIN:  # most values of a state: skip the match below
            if kind is str:
                return _check_text(value, path)
            return {"int": hex(value)} if _is_long(value) else value
        if isinstance(value, _TENSORS):
            return self._describe_tensor(value, path)
        if depth > _MAX_DEPTH:
            raise UnsupportedTensorError(f"{path}: nested more than {_MAX_DEPTH} levels deep")

        def inner(part: Any, key: object) -> Any:
            return self.describe(part, _join(path, key), depth + 1)

        def items(table: Mapping[Any, Any]) -> list[Any]:
            return self.describe_items(table, path, depth)

        def elements() -> list[Any]:
            return [inner(part, i) for i, part in enumerate(value)]

        if isinstance(value, Enum):
            self.reduce(kind, type(value.value), path)
            return self.describe(value.value, path, depth + 1)
        if isinstance(value, np.generic | np.ndarray):
            return self._describe_numpy(value, path)
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            self.reduce(kind, tuple, path)
            return {"tuple": elements()}
        if isinstance(value, str):
            self.reduce(kind, str, path)
            return _check_text(str.__str__(value), path)
        if isinstance(value, torch.dtype):
            return {"dtype": _name_dtype(value, path)}
        if isinstance(value, torch.device):
            return {"device": str(value)}
        # By the exact class: subclasses may have more state than their base class.
        if kind is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        if kind is complex:
            return {"complex": [inner(value.real, "real"), inner(value.imag, "imag")]}
        if kind is torch.Size:
            return {"size": list(value)}
        if kind is list:
            return {"list": elements()}
        if kind is tuple:
            return {"tuple": elements()}
        if kind is deque:
            return {"deque": elements(), **_drop_none(maxlen=value.maxlen)}
        if kind in (set, frozenset):
            _check_enum_keys(dict.fromkeys(value), path)
            return {kind.__name__: sorted(elements(), key=json.dumps)}  # equal sets, equal bytes
        if kind is OrderedDict:
            pairs = items(value)
            extra = getattr(value, "_metadata", None)  # set by nn.Module.state_dict()
            metadata = {} if extra is None else {"metadata": inner(extra, "_metadata")}
            return {"ordered": pairs, **metadata}
        if kind is Counter:  # milestones of a scheduler
            return {"counter": items(value)}
        if kind is dict:
            return {"dict": items(value)}
        if kind is defaultdict:
            return {"defaultdict": [_name_factory(value, path), items(value)]}
        node = values.describe(value, _Scope(self, path, depth))
        if node is not None:
            return node
        raise UnsupportedTensorError(_explain(value, path))

    def describe_items(self, table: Mapping[Any, Any], path: str, depth: int) -> list[Any]:
        """Return JSON for the keys and values of a table: a list of pairs."""
        pairs = [
            [
                self.describe(key, _join(path, "key"), depth + 1),
                self.describe(value, _join(path, key), depth + 1),
            ]
            for key, value in table.items()
        ]
        _check_enum_keys(table, path)
        return pairs

    def keep(self, path: str, x: Tensor | Encoded) -> str:
        """Store a tensor, and return its name: the path, or a free name like it."""
        name = path
        while name in self.tensors:  # {"a": {"b": x}, "a.b": y}
            name += "_"
        self.tensors[name] = x
        return name

    def reduce(self, cls: type, plain: type, path: str) -> None:
        """Note a value that is stored without its class."""
        self.reduced.setdefault(cls, [plain.__name__]).append(path)

    def _describe_tensor(self, x: Tensor | Encoded, path: str) -> Json:
        name = self.keep(path, x)
        if type(x) is nn.Parameter:
            grad = x.requires_grad
            return {"parameter": name, "requires_grad": grad, **_drop_none(order=find_order(x))}
        if type(x) is not Tensor:
            return {"tensor": name}
        requires_grad = True if x.requires_grad and x.is_leaf else None
        return {"tensor": name, **_drop_none(requires_grad=requires_grad, order=find_order(x))}

    def _describe_numpy(self, value: Any, path: str) -> Json:
        if isinstance(value, np.str_):
            return {"numpy_str": _check_text(str(value), path)}
        if isinstance(value, np.bytes_):
            return {"numpy_bytes": base64.b64encode(value).decode()}
        if isinstance(value, np.ndarray) and type(value) is not np.ndarray:
            raise UnsupportedTensorError(_explain(value, path))
        x = _numpy_to_tensor(np.asarray(value), path)
        kind = "array" if isinstance(value, np.ndarray) else "scalar"
        is_plain = value.dtype.isnative and value.dtype.kind in "biufc"
        return {kind: self.keep(path, x), **({} if is_plain else {"dtype": value.dtype.str})}


@dataclass(frozen=True)
class _Scope:
    """The place of a value that `values.describe` describes."""

    outliner: _Outliner
    path: str
    depth: int

    def inner(self, part: Any, key: object = None) -> Any:
        path = self.path if key is None else _join(self.path, key)
        return self.outliner.describe(part, path, self.depth + 1)

    def items(self, table: Mapping[Any, Any]) -> list[Any]:
        return self.outliner.describe_items(table, self.path, self.depth)

    def keep(self, x: Tensor) -> str:
        return self.outliner.keep(self.path, x)

    def reduce(self, cls: type, plain: type) -> None:
        self.outliner.reduce(cls, plain, self.path)


def _join(path: str, key: object) -> str:
    key = hex(key) if _is_long(key) else key
    return f"{path}.{key}" if path else str(key)


def _drop_none(**fields: Any) -> Json:
    return {key: value for key, value in fields.items() if value is not None}


def _is_long(value: object) -> TypeGuard[int]:
    return type(value) is int and value.bit_length() > _MAX_JSON_BITS


def _numpy_to_tensor(array: np.ndarray[Any, Any], path: str) -> Tensor:
    """Return the items in native byte order, dates and durations as integers."""
    kind, itemsize = array.dtype.kind, array.dtype.itemsize
    if kind not in "biufcmM" or itemsize > (16 if kind == "c" else 8):
        hint = {"U": "store a list of str", "S": "store a list of bytes"}.get(
            kind, "convert it to another dtype first"
        )
        raise UnsupportedTensorError(
            f"{path}: cannot store NumPy values of dtype {array.dtype}; {hint}"
        )
    if not array.dtype.isnative:
        array = array.byteswap()
    # By size: torch does not support `ulonglong`, which equals `uint64`.
    array = array.view(np.int64 if kind in "mM" else f"={kind}{itemsize}")
    if not (array.flags.c_contiguous and array.flags.writeable):
        array = array.copy(order="C")
    return torch.from_numpy(array)


def _name_dtype(dtype: torch.dtype, path: str) -> str:
    try:
        return dtype_name(dtype)
    except KeyError:
        raise UnsupportedTensorError(f"{path}: cannot store the dtype {dtype}") from None


def _check_enum_keys(table: Mapping[Any, Any], path: str) -> None:
    """Raise if the keys of a table cannot be replaced by the values of their Enum."""
    if not any(isinstance(key, Enum) for key in table):
        return
    values = [key.value if isinstance(key, Enum) else key for key in table]
    if not all(isinstance(value, Hashable) for value in values) or len(set(values)) < len(values):
        raise UnsupportedTensorError(
            f"{path}: cannot store these members of an Enum as keys or in a set; use their values"
        )


def _name_factory(value: defaultdict[Any, Any], path: str) -> str | None:
    factory = value.default_factory
    if factory is None:
        return None
    for name, known in _FACTORIES.items():
        if factory is known:
            return name
    raise UnsupportedTensorError(
        f"{path}: cannot store a defaultdict with the factory {factory!r}; store dict(value)"
    )


def _explain(value: Any, path: str) -> str:
    """Return the message for a value that cannot be stored."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    hint = ""
    if isinstance(value, np.ma.MaskedArray):
        hint = "; store its data and its mask as two arrays"
    elif isinstance(value, np.ndarray):
        hint = "; store numpy.asarray(value)"
    elif isinstance(value, Mapping):
        hint = "; store dict(value)"
    else:
        for base in (list, tuple, bytes, bytearray, int, float, complex):
            if isinstance(value, base):
                hint = f"; store {'bytes' if base is bytearray else base.__name__}(value)"
    return f"{path or 'state'}: cannot store values of type {kind}{hint}"


def _check_text(text: str, path: str) -> str:
    if not is_valid_text(text):
        raise UnsupportedTensorError(f"{path}: text is not valid Unicode: {text[:80]!r}")
    return text


@dataclass
class _Rebuilder:
    """Rebuilds a state from its outline."""

    tensors: Mapping[str, Tensor]
    ordered: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Tensors and their copies with other strides: tied names get the same copy."""
    variables: dict[object, tuple[Tensor, Tensor]] = field(default_factory=dict)
    """Tensors and the parameters made of them: tied names get the same parameter."""

    def rebuild(self, data: Any, depth: int) -> Any:
        if data is None or isinstance(data, bool | int | float | str):
            return data
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")

        def inner(part: Any) -> Any:
            return self.rebuild(part, depth + 1)

        match data:
            case {"tensor": str(name), "requires_grad": bool(requires_grad)}:
                x = self._find_tensor(name, data.get("order"))
                return self._make_variable(x, Tensor, requires_grad)
            case {"tensor": str(name)}:
                return self._find_tensor(name, data.get("order"))
            case {"parameter": str(name), "requires_grad": bool(requires_grad)}:
                x = self._find_tensor(name, data.get("order"))
                return self._make_variable(x, nn.Parameter, requires_grad)
            case {"int": str(text)}:
                return int(text, 16)
            case {"float": str(text)}:
                return float(text)
            case {"complex": [real, imag]}:
                return complex(inner(real), inner(imag))
            case {"numpy_str": str(text)}:
                return np.str_(text)
            case {"numpy_bytes": str(text)}:
                return np.bytes_(base64.b64decode(text, validate=True))
            case {"array": str(name)}:
                return _tensor_to_numpy(self.tensors[name], data.get("dtype"))
            case {"scalar": str(name)}:
                return _tensor_to_numpy(self.tensors[name], data.get("dtype"))[()]
            case {"dtype": str(name)}:
                return find_dtype(name)
            case {"device": str(name)}:
                return torch.device(name)
            case {"size": list(sizes)}:
                return torch.Size(sizes)
            case {"list": list(parts)}:
                return [inner(part) for part in parts]
            case {"tuple": list(parts)}:
                return tuple(inner(part) for part in parts)
            case {"deque": list(parts)}:
                return deque(map(inner, parts), data.get("maxlen"))
            case {"set": list(parts)}:
                return set(map(inner, parts))
            case {"frozenset": list(parts)}:
                return frozenset(map(inner, parts))
            case {"dict": list(pairs)}:
                return {inner(key): inner(value) for key, value in pairs}
            case {"defaultdict": [str() | None as factory, list(pairs)]}:
                make = None if factory is None else _FACTORIES[factory]
                return defaultdict(make, {inner(key): inner(value) for key, value in pairs})
            case {"counter": list(pairs)}:
                return Counter({inner(key): inner(value) for key, value in pairs})
            case {"ordered": list(pairs), **rest}:
                table: Any = OrderedDict((inner(key), inner(value)) for key, value in pairs)
                if "metadata" in rest:
                    table._metadata = inner(rest["metadata"])
                return table
        return values.rebuild(data, inner)

    def _find_tensor(self, name: str, order: object) -> Tensor:
        """Return a tensor, with the strides of its order if it is not contiguous."""
        x = self.tensors[name]
        if order is None or type(x) is not Tensor:  # others stay compressed in memory
            return x
        if not isinstance(order, list) or sorted(order) != list(range(x.dim())):
            raise ValueError(f"{name}: invalid order of dimensions: {str(order)[:80]}")
        key = id(x), tuple(order)
        if key not in self.ordered:
            self.ordered[key] = x, with_strides(x, permuted_strides(x.shape, order))
        return self.ordered[key][1]

    def _make_variable(self, x: Tensor, cls: type[Tensor], requires_grad: bool) -> Tensor:
        key = id(x), cls, requires_grad
        if key not in self.variables:
            made = nn.Parameter(x.detach(), False) if cls is nn.Parameter else x.detach()
            self.variables[key] = x, made.requires_grad_(requires_grad)
        return self.variables[key][1]


def _tensor_to_numpy(x: Tensor, dtype: str | None) -> np.ndarray[Any, Any]:
    """Undo `_numpy_to_tensor`."""
    array = x.numpy()
    if dtype is None:
        return array
    if not _NUMPY_DTYPE.fullmatch(dtype) or np.dtype(dtype).itemsize != array.itemsize:
        raise ValueError(f"invalid dtype {dtype[:80]!r} of a NumPy array")
    array = array if np.dtype(dtype).isnative else array.byteswap()
    return array.view(dtype)
