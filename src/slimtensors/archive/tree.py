"""Nested states (dicts, tuples, numbers, dtypes) as flat tensors and a JSON outline.

`flatten` extracts the tensors of a state and describes the rest as JSON; `unflatten` rebuilds it.
Nothing is pickled, so loading a file never executes code.
"""

import base64
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimtensors.codecs.plan import Encoded
from slimtensors.errors import CorruptFileError, UnsupportedTensorError
from slimtensors.tensor import Json, dtype_name, find_dtype, is_valid_text

_MAX_DEPTH = 100
_PLAIN = (str, int, bool, type(None))
_TENSORS = (Tensor, Encoded)


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor | Encoded], Json | None]:
    """Return the tensors of a state by name and an outline of the rest, None if all are tensors.

    The name of a tensor is its path in the state, joined by dots. Tensors may be encoded.
    """
    tensors: dict[str, Tensor | Encoded] = {}
    if all(isinstance(k, str) and isinstance(v, Tensor | Encoded) for k, v in state.items()):
        return dict(state), None

    def keep(path: str, x: Tensor | Encoded) -> str:
        name = path
        while name in tensors:  # {"a": {"b": x}, "a.b": y}
            name += "_"
        tensors[name] = x
        return name

    return tensors, _outline(state, "", keep, 0)


def unflatten(outline: Json, tensors: Mapping[str, Tensor]) -> Any:
    """Return the state that was passed to `flatten`."""
    try:
        return _rebuild(outline, tensors, 0)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptFileError(f"malformed state outline: {error!r}") from error


def _outline(
    value: Any, path: str, keep: Callable[[str, Tensor | Encoded], str], depth: int
) -> Any:
    """Return JSON for `value`: plain if JSON supports it, else an object keyed by its type."""
    if type(value) in _PLAIN:  # most values of a state: skip the match below
        return _check_text(value, path) if type(value) is str else value
    if isinstance(value, _TENSORS):
        return {"tensor": keep(path, value)}
    if depth > _MAX_DEPTH:
        raise UnsupportedTensorError(f"{path}: nested more than {_MAX_DEPTH} levels deep")

    def inner(part: Any, key: object) -> Any:
        return _outline(part, f"{path}.{key}" if path else str(key), keep, depth + 1)

    match value:
        case str():
            return _check_text(value, path)
        case float() if type(value) is float:
            return value if math.isfinite(value) else {"float": repr(value)}
        case complex():
            return {"complex": [inner(value.real, "real"), inner(value.imag, "imag")]}
        case bytes():
            return {"bytes": base64.b64encode(value).decode()}
        case torch.dtype():
            return {"dtype": dtype_name(value)}
        case torch.device():
            return {"device": str(value)}
        case torch.Size():
            return {"size": list(value)}
        case np.ndarray() if value.dtype.kind in "biufc":
            return {"array": keep(path, torch.from_numpy(np.ascontiguousarray(value)))}
        case np.generic() if value.dtype.kind in "biufc":
            return {"scalar": keep(path, torch.from_numpy(np.array(value)))}
        case list() if type(value) is list:
            return {"list": [inner(part, i) for i, part in enumerate(value)]}
        case tuple() if type(value) is tuple:
            return {"tuple": [inner(part, i) for i, part in enumerate(value)]}
        case OrderedDict() if type(value) is OrderedDict:
            pairs = [[inner(k, "key"), inner(v, k)] for k, v in value.items()]
            extra = getattr(value, "_metadata", None)  # set by nn.Module.state_dict()
            return {"ordered": pairs, **({"metadata": inner(extra, "_metadata")} if extra else {})}
        case Counter() if type(value) is Counter:  # milestones of a scheduler
            return {"counter": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
        case dict() if type(value) is dict:
            return {"dict": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    raise UnsupportedTensorError(
        f"{path}: cannot store values of type {type(value).__module__}.{type(value).__qualname__}"
    )


def _check_text(text: str, path: str) -> str:
    if not is_valid_text(text):
        raise UnsupportedTensorError(f"{path}: text is not valid Unicode: {text[:80]!r}")
    return text


def _rebuild(data: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")

    def inner(part: Any) -> Any:
        return _rebuild(part, tensors, depth + 1)

    match data:
        case {"tensor": str(name)}:
            return tensors[name]
        case {"float": str(text)}:
            return float(text)
        case {"complex": [real, imag]}:
            return complex(inner(real), inner(imag))
        case {"bytes": str(text)}:
            return base64.b64decode(text, validate=True)
        case {"dtype": str(name)}:
            return find_dtype(name)
        case {"device": str(name)}:
            return torch.device(name)
        case {"size": list(sizes)}:
            return torch.Size(sizes)
        case {"array": str(name)}:
            return tensors[name].numpy()
        case {"scalar": str(name)}:
            return tensors[name].numpy()[()]
        case {"list": list(parts)}:
            return [inner(part) for part in parts]
        case {"tuple": list(parts)}:
            return tuple(inner(part) for part in parts)
        case {"dict": list(pairs)}:
            return {inner(key): inner(value) for key, value in pairs}
        case {"counter": list(pairs)}:
            return Counter({inner(key): inner(value) for key, value in pairs})
        case {"ordered": list(pairs), **rest}:
            table: Any = OrderedDict((inner(key), inner(value)) for key, value in pairs)
            if "metadata" in rest:
                table._metadata = inner(rest["metadata"])
            return table
    raise ValueError(f"unknown type: {str(data)[:80]}")
