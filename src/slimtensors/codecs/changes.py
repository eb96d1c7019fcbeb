"""Changes of floats since a base, as one stream of bytes (docs/format-residuals.md)."""

import struct
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.dense import Dense
from slimtensors.codecs.plan import Encoded, Plan, encode
from slimtensors.codecs.residual import ResidualKind, apply_residual, residual
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Spec, allocate, as_bytes, ceil_div, concatenate, empty_bytes

ChangeKind = Literal["sparse-change", "expected-change"]
"""Few items changed; most items changed, by about as much as their row and column."""

CHANGE_KINDS: tuple[ChangeKind, ...] = get_args(ChangeKind)

DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
"""Dtypes that have these kinds, and their names in the core."""

_CHUNKS = {"sparse-change": _core.SPARSE_CHUNK, "expected-change": _core.EXPECTED_CHUNK}
_MIN_WIDTH, _MAX_WIDTH = 16, 1 << 16
_VECTOR_WIDTH = 4096
_HEAD = struct.Struct("<I")
_SPARSE = 1 << 12
"""Changes per 2^16 items up to which `sparse-change` is used: faster, and about as small."""


def choose_kind(x: Tensor, base: Tensor) -> ChangeKind | None:
    """Return the kind to try for two tensors of the same dtype and shape; None for other dtypes."""
    if x.dtype not in DTYPES or not x.numel():
        return None
    changes = _core.sample_changes(as_bytes(x), as_bytes(base), DTYPES[x.dtype])
    return "sparse-change" if changes < _SPARSE else "expected-change"


def encode_residual(kind: str, x: Tensor, base: Tensor, each: Each = serially) -> Tensor | Encoded:
    """Return the residual of `x` against `base`, of any kind."""
    if kind in CHANGE_KINDS:
        return encode(Plan(Dense()), encode_changes(kind, x, base, each))
    return residual(cast(ResidualKind, kind), x, base, each=each)


def decode_residual(kind: str, r: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the tensor with the residual `r`, of any kind, against `base`."""
    if kind in CHANGE_KINDS:
        return apply_changes(kind, r, base, each)
    return apply_residual(cast(ResidualKind, kind), r, base, each=each)


def encode_changes(kind: ChangeKind, x: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the changes of `x` since `base`, which has the same dtype and shape.

    The stream contains the size of the model, the model, the sizes of all chunks, and the chunks.
    """
    spec = Spec.of(x)
    dtype, items, before = DTYPES[x.dtype], as_bytes(x), as_bytes(base)
    chunks = _list_chunks(kind, spec)
    if kind == "sparse-change":
        model = _core.sparse_fit(items, before, dtype)

        def encode_chunk(i: int) -> Tensor:
            part = chunks[i]
            chunk = empty_bytes(_core.sparse_bound((part.stop - part.start) // spec.dtype.itemsize))
            return chunk[
                : _core.sparse_encode(items[part], before[part], dtype, model, chunk)
            ].clone()

    else:
        model = _core.expected_fit(items, before, dtype, _choose_width(spec))
        coder = _core.ExpectedModel(model, dtype, spec.numel)

        def encode_chunk(i: int) -> Tensor:
            part = chunks[i]
            chunk = empty_bytes(coder.chunk_bound((part.stop - part.start) // spec.dtype.itemsize))
            first = part.start // spec.dtype.itemsize
            return chunk[: coder.encode(first, items[part], before[part], chunk)].clone()

    pieces = each(encode_chunk, len(chunks))
    sizes = np.array([piece.numel() for piece in pieces], dtype="<u4")
    head = bytearray(_HEAD.pack(len(model)) + model + sizes.tobytes())
    return concatenate([torch.frombuffer(head, dtype=torch.uint8), *pieces])


def apply_changes(kind: ChangeKind, stream: Tensor, base: Tensor, each: Each = serially) -> Tensor:
    """Return the tensor that has these changes since `base`."""
    like = Spec.of(base)
    if like.dtype not in DTYPES or stream.dtype is not torch.uint8 or stream.dim() != 1:
        raise CorruptFileError(f"changes of {stream.dtype} do not fit a base of {like.dtype}")
    dtype, chunks = DTYPES[like.dtype], _list_chunks(kind, like)
    model, ranges = _split(stream, len(chunks))
    out = allocate(like)
    before, items = as_bytes(base), as_bytes(out)
    decode: Callable[[Tensor, slice], None]
    try:
        if kind == "sparse-change":

            def decode(chunk: Tensor, part: slice) -> None:
                _core.sparse_decode(chunk, before[part], dtype, model, items[part])

        else:
            coder = _core.ExpectedModel(model, dtype, like.numel)

            def decode(chunk: Tensor, part: slice) -> None:
                coder.decode(part.start // like.dtype.itemsize, chunk, before[part], items[part])

        each(lambda i: decode(stream[ranges[i]], chunks[i]), len(chunks))
    except ValueError as error:
        raise CorruptFileError(str(error)) from error
    return out


def _list_chunks(kind: ChangeKind, spec: Spec) -> list[slice]:
    """Return the byte ranges of the chunks of a tensor."""
    size = _CHUNKS[kind] * spec.dtype.itemsize
    return [
        slice(i * size, min((i + 1) * size, spec.nbytes))
        for i in range(ceil_div(spec.nbytes, size))
    ]


def _choose_width(spec: Spec) -> int:
    """Return the number of items in a row: the last dimensions, as many as needed."""
    width = 1
    for size in reversed(spec.shape[1:]):
        width *= size
        if width >= _MIN_WIDTH:
            break
    if not _MIN_WIDTH <= width <= _MAX_WIDTH:
        width = _VECTOR_WIDTH
    return min(width, spec.numel)


def _split(stream: Tensor, chunks: int) -> tuple[Tensor, Sequence[slice]]:
    """Return the model and the ranges of the chunks of a stream."""
    raw = stream.numpy()
    size = _HEAD.unpack(raw[: _HEAD.size].tobytes())[0] if len(raw) >= _HEAD.size else len(raw)
    start = _HEAD.size + size + 4 * chunks
    if start > len(raw):
        raise CorruptFileError(f"changes of {len(raw)} bytes are too short")
    sizes = raw[_HEAD.size + size : start].view("<u4") if chunks else raw[:0]
    ends = list(accumulate(sizes.tolist(), initial=start))
    if ends[-1] != len(raw):
        raise CorruptFileError(f"expected {ends[-1]} bytes of changes, got {len(raw)}")
    return stream[_HEAD.size : _HEAD.size + size], [slice(a, b) for a, b in pairwise(ends)]
