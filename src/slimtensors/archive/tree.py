"""States that are not all tensors: dicts, tuples, numbers, dtypes — stored as tensors and JSON.

`flatten` takes the tensors out of a state and leaves a JSON outline of the rest; `unflatten` puts
them back. Nothing is pickled, so a file can hold nothing that runs.
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

_DEEPEST = 100
_PLAIN = (str, int, bool, type(None))
_TENSORS = (Tensor, Encoded)


def flatten(state: Mapping[str, Any]) -> tuple[dict[str, Tensor | Encoded], Json | None]:
    """Return the tensors of a state by name, and an outline of the rest; none if all are tensors.

    A tensor in a table keeps its key as its name; one further inside gets its path, joined by dots.
    A tensor may be there in encoded form.
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
    """Return the state that `flatten` took apart."""
    try:
        return _rebuilt(outline, tensors, 0)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CorruptFileError(f"not an outline of a state: {error!r}") from error


def _outline(
    value: Any, path: str, keep: Callable[[str, Tensor | Encoded], str], depth: int
) -> Any:
    """Return JSON for `value`: plain where JSON has it, else a table with one key, its kind."""
    if type(value) in _PLAIN:  # as most of a state is: worth a way around all that follows
        return _checked(value, path) if type(value) is str else value
    if isinstance(value, _TENSORS):
        return {"tensor": keep(path, value)}
    if depth > _DEEPEST:
        raise UnsupportedTensorError(f"{path}: is nested more than {_DEEPEST} deep")

    def inner(part: Any, key: object) -> Any:
        return _outline(part, f"{path}.{key}" if path else str(key), keep, depth + 1)

    match value:
        case str():
            return _checked(value, path)
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
            extra = getattr(value, "_metadata", None)  # what nn.Module.state_dict() adds
            return {"ordered": pairs, **({"metadata": inner(extra, "_metadata")} if extra else {})}
        case Counter() if type(value) is Counter:  # the milestones of a scheduler
            return {"counter": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
        case dict() if type(value) is dict:
            return {"dict": [[inner(k, "key"), inner(v, k)] for k, v in value.items()]}
    raise UnsupportedTensorError(
        f"{path}: a {type(value).__module__}.{type(value).__qualname__} cannot be stored"
    )


def _checked(text: str, path: str) -> str:
    if not is_valid_text(text):
        raise UnsupportedTensorError(f"{path}: holds half a character: {text[:80]!r}")
    return text


def _rebuilt(data: Any, tensors: Mapping[str, Tensor], depth: int) -> Any:
    if data is None or isinstance(data, bool | int | float | str):
        return data
    if depth > _DEEPEST:
        raise ValueError("nested too deep")

    def inner(part: Any) -> Any:
        return _rebuilt(part, tensors, depth + 1)

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
    raise ValueError(f"unknown kind: {str(data)[:80]}")
