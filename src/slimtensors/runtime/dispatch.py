"""Tensor subclasses whose operators are listed in a table, with dense copies for all others."""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from slimtensors.errors import UnsupportedOperationError

_LOG = logging.getLogger(__name__)


class DispatchedTensor(Tensor):
    """A tensor that runs implementations registered by `implements`."""

    def dequantize(self) -> Tensor:
        """Return the dense tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run = _FUNCTIONS.get(func, func)
        with torch._C.DisableTorchFunctionSubclass():
            return run(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Iterable[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_view = getattr(func, "is_view", False)
        if is_view and torch.is_inference_mode_enabled() and not args[0].is_inference():
            # torch requires that a tensor and its views agree.
            with torch.inference_mode(mode=False), torch.no_grad():
                return _run(func, args, kwargs or {})
        return _run(func, args, kwargs or {})


DENSE: Any = NotImplemented
"""Result of an implementation that leaves the operator to dense copies."""

_FUNCTIONS: dict[Any, Callable[..., Any]] = {}
"""Implementations of torch functions, which are called before torch selects an operator."""

_OPERATIONS: dict[Any, Callable[..., Any]] = {}
"""Implementations of operators; they may return `DENSE`."""


def _run(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    handler = _OPERATIONS.get(func)
    if handler is None:
        _check_writes(func, args, kwargs)
        # In inference mode torch does not decompose operators that consist of others.
        handler = getattr(func, "decompose", None)
    result = DENSE if handler is None else handler(*args, **kwargs)
    return _compute_dense(func, args, kwargs) if result is DENSE else result


_Handler = TypeVar("_Handler", bound=Callable[..., Any])


def implements(*targets: Any) -> Callable[[_Handler], _Handler]:
    """Register the decorated function for operators (`torch.ops.aten…`) or torch functions."""

    def register(handler: _Handler) -> _Handler:
        for target in targets:
            table = _OPERATIONS if isinstance(target, OpOverload) else _FUNCTIONS
            table[target] = handler
        return handler

    return register


_reported: set[tuple[str, type]] = set()
"""Operators and classes for which dense computation has been reported."""


def report_dense(operator: str, kind: type) -> None:
    """Log that an operator runs on a dense copy, once per operator and class."""
    if not torch.compiler.is_dynamo_compiling() and (operator, kind) not in _reported:
        _reported.add((operator, kind))
        _LOG.warning("%s: computed on a dense copy of %s (reported once)", operator, kind.__name__)


def _compute_dense(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on dequantized tensors."""
    report_dense(str(func), type(_list_dispatched((args, kwargs))[0]))
    args, kwargs = tree_map_only(DispatchedTensor, to_dense, (args, kwargs))
    return func(*args, **kwargs)


def to_dense(x: Tensor) -> Tensor:
    """Return a tensor that is not compressed."""
    return x.dequantize() if isinstance(x, DispatchedTensor) else x


def _check_writes(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raise `UnsupportedOperationError` if an operator writes to a compressed tensor."""
    schema = getattr(func, "_schema", None)
    if schema is None or func.namespace == "c10d":  # which do not declare what they write to
        written: list[Any] = [args, kwargs]
    else:
        values = [*args, *(kwargs.get(x.name) for x in schema.arguments[len(args) :])]
        written = [
            value
            for argument, value in zip(schema.arguments, values, strict=True)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
    for x in _list_dispatched(written):
        raise UnsupportedOperationError(
            f"{func} is not supported by {type(x).__name__}, which cannot be changed in place;"
            " call dequantize() for a dense tensor"
        )


def _list_dispatched(tree: Any) -> list[DispatchedTensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, DispatchedTensor)]
