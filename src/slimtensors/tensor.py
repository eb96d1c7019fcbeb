"""Tensor basics: specs, dtype names, byte views, bitwise comparison, zeros, allocation."""

import math
import mmap
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import FormatError, UnsupportedTensorError

Json = dict[str, Any]

Parts = dict[str, Tensor]
"""Named plain tensors, the output of a codec."""

_INTEGERS = {f"{sign}int{bits}" for sign in ("", "u") for bits in (*range(1, 9), 16, 32, 64)}
_FLOATS = {"float64", "float32", "float16", "bfloat16", "complex32", "complex64", "complex128"}
_SMALL = {
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
    "float4_e2m1fn_x2",
}
_BITS = {"bool", "bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"}

DTYPES: dict[str, torch.dtype] = {
    name: getattr(torch, name)
    for name in sorted(_INTEGERS | _FLOATS | _SMALL | _BITS)
    if hasattr(torch, name)  # older torch releases lack some of the small ones
}
"""Every dtype that can be stored, by its name in torch."""

QUANTIZED_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""The torch quantized dtypes that can be stored, with the dtypes of their integers."""

_BY_NAME = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in QUANTIZED_DTYPES}
_NAMES = {dtype: name for name, dtype in _BY_NAME.items()}

KERNEL_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
"""The float dtypes that the C++ kernels read and write."""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Spec:
    """Data type and shape of a tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, x: Tensor) -> "Spec":
        """Return the spec of `x`."""
        return cls(x.dtype, tuple(x.shape))

    def __str__(self) -> str:
        return f"{_NAMES.get(self.dtype, self.dtype)} {list(self.shape)}"

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Number of bytes of the plain tensor."""
        return self.numel * self.dtype.itemsize

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"dtype": _NAMES[self.dtype], "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Json) -> "Spec":
        """Parse the JSON form; raise `FormatError` if it is malformed."""
        try:
            dtype = _BY_NAME[data["dtype"]]
        except (KeyError, TypeError):
            raise FormatError(f"unknown dtype {str(data.get('dtype'))[:80]!r}") from None
        return cls(dtype, parse_shape(data.get("shape")))


def parse_shape(data: object) -> tuple[int, ...]:
    """Return `data` as a shape; raise `FormatError` unless it is a list of valid sizes."""
    if not isinstance(data, list) or len(data) > 64:
        raise FormatError(f"invalid shape: {str(data)[:80]}")
    items = 1
    for n in data:
        if type(n) is not int or n < 0:  # not isinstance: True is an int
            raise FormatError(f"invalid shape: {str(data)[:80]}")
        items *= n or 1
    if items >= 1 << 58:  # the size in bytes must fit into a signed 64-bit integer
        raise FormatError(f"shape too large: {str(data)[:80]}")
    return tuple(data)


def is_valid_text(text: str) -> bool:
    """Return True if the string can be encoded as UTF-8: JSON allows lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name in files; raise `KeyError` if there is none."""
    return _BY_NAME[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in files."""
    return _NAMES[dtype]


_WORDS = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}


def as_bytes(x: Tensor) -> Tensor:
    """View `x` as a flat tensor of its bytes. Copies only if `x` is not contiguous."""
    if not x.is_contiguous():
        # Copy as words: some dtypes can be viewed, but have no copy kernel.
        x = x.view(_WORDS[x.element_size()]).contiguous()
    if x.dim() != 1 or x.stride(0) != 1:  # any stride is contiguous with fewer than two items
        x = x.as_strided((x.numel(),), (1,))
    return x if x.dtype is torch.uint8 else x.view(torch.uint8)


def dense_strides(x: Tensor) -> tuple[int, ...]:
    """Return the strides for a copy of `x`: its own if they are a permutation of contiguous ones.

    Otherwise (gaps, overlaps) those of a contiguous tensor.
    """
    expected = 1
    dims = [(step, n) for step, n in zip(x.stride(), x.shape, strict=True) if n != 1]
    for step, n in sorted(dims):
        if step != expected:
            return contiguous_strides(x.shape)
        expected *= n
    return x.stride() if expected else contiguous_strides(x.shape)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor of this shape."""
    return permuted_strides(shape, range(len(shape)))


def permuted_strides(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Return dense strides; `order` lists the dimensions from the outermost to the innermost."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def find_order(x: Tensor) -> list[int] | None:
    """Return the order of dimensions for `permuted_strides`, or None if contiguous or not dense."""
    if x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return None
    sizes, strides = x.shape, x.stride()
    # A dimension of size 1 has the stride of the next outer one, which is listed first.
    order = sorted(range(x.dim()), key=lambda dim: (-strides[dim], sizes[dim] == 1))
    if order == list(range(x.dim())) or not x.numel():
        return None
    return order if permuted_strides(sizes, order) == strides else None


def with_strides(x: Tensor, strides: Sequence[int]) -> Tensor:
    """Return `x` with these dense strides, copied unless it has them."""
    if tuple(x.stride()) == tuple(strides):
        return x
    words = x.view(_WORDS[x.element_size()])  # some dtypes have no copy kernel
    target = torch.empty_strided(x.shape, tuple(strides), dtype=words.dtype, device=x.device)
    return target.copy_(words).view(x.dtype)


_COMPARED = 1 << 18
"""Bytes per comparison."""


def bitwise_equal(x: Tensor, y: Tensor) -> bool:
    """Return True if two tensors have the same dtype, shape and bits."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    if x.device.type != "cpu" or y.device.type != "cpu":
        return torch.equal(as_bytes(x), as_bytes(y))
    # numpy, in pieces: torch starts threads even if the first items already differ.
    a, b = as_bytes(x).numpy(), as_bytes(y).numpy()
    pieces = (slice(i, i + _COMPARED) for i in range(0, a.size, _COMPARED))
    return all(np.array_equal(a[piece], b[piece]) for piece in pieces)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy all items; cast if the dtypes differ."""
    if target.dtype == source.dtype:  # as words: some dtypes have no copy kernel
        words = _WORDS[source.element_size()]
        target, source = target.view(words), source.view(words)
    target.copy_(source)


def _allocate_plain(spec: Spec) -> Tensor:
    """Return an uninitialized tensor."""
    if spec.dtype is torch.complex32:  # torch.empty would warn
        return torch.empty(spec.shape, dtype=torch.int32).view(torch.complex32)
    return torch.empty(spec.shape, dtype=spec.dtype)


def view_as(raw: memoryview, spec: Spec) -> Tensor:
    """View bytes as the tensor that `spec` describes. Copies only if they are not aligned."""
    if spec.dtype in QUANTIZED_DTYPES:
        raise FormatError(f"a tensor of {spec.dtype} cannot be read from plain bytes")
    if not raw:
        return _allocate_plain(spec)
    x = torch.frombuffer(raw, dtype=spec.dtype)
    if x.data_ptr() % spec.dtype.itemsize:
        x = torch.frombuffer(bytearray(raw), dtype=spec.dtype)
    return x if len(spec.shape) == 1 else x.view(spec.shape)


def check_storable(name: str, x: object) -> Tensor:
    """Return `x` if it is a tensor that can be stored; raise `UnsupportedTensorError` if not."""
    if not isinstance(x, Tensor):
        raise UnsupportedTensorError(f"{name}: expected a tensor, got {type(x).__name__}")
    if x.is_nested:
        raise UnsupportedTensorError(f"{name}: nested tensors cannot be stored; store their parts")
    if x.layout is not torch.strided:
        raise UnsupportedTensorError(
            f"{name}: layout {x.layout} cannot be stored; store x.to_dense()"
        )
    if x.dtype not in _NAMES:
        hint = "; store x.dequantize()" if x.is_quantized else ""
        raise UnsupportedTensorError(f"{name}: tensors of {x.dtype} cannot be stored{hint}")
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsupportedTensorError(f"{name}: tensor type {type(x).__name__} cannot be stored")
    if x.is_meta:
        raise UnsupportedTensorError(f"{name}: tensor is on the meta device and has no data")
    if memory_extent(x) > x.untyped_storage().nbytes():
        raise UnsupportedTensorError(f"{name}: the tensor's memory has been freed")
    return x


def memory_extent(x: Tensor) -> int:
    """Return the number of bytes from the start of the storage to the last item."""
    if x.is_contiguous():
        return int(x.storage_offset() + x.numel()) * x.element_size() if x.numel() else 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset() + last + 1) * x.element_size()


def to_cpu(x: Tensor) -> Tensor:
    """Return `x` in main memory, detached, with lazy conjugation and negation resolved."""
    x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.cpu()


_HUGE_PAGE = 2 << 20
_SLOW = 0.001
"""Seconds for the first huge page above which small pages are faster. Clearing a page takes a
fifth of that, but a virtual machine may have to get the memory back from its host first."""
_MIN_HUGE = 2 * _HUGE_PAGE
"""Smaller results use torch's allocator, which reuses pages it already has."""

_local = threading.local()


def scratch(nbytes: int) -> Tensor:
    """Return a buffer that the next call on the same thread may return again."""
    buffer: Tensor | None = getattr(_local, "buffer", None)
    if buffer is None or buffer.nbytes < nbytes:
        buffer = _local.buffer = allocate(Spec(torch.uint8, (nbytes,)))
    return buffer


def empty_bytes(count: int) -> Tensor:
    """Return an uninitialized buffer of `count` bytes."""
    return torch.empty(count, dtype=torch.uint8)


def concatenate(pieces: Sequence[Tensor]) -> Tensor:
    """Concatenate flat tensors without starting torch's threads."""
    return torch.from_numpy(np.concatenate([piece.numpy() for piece in pieces]))


def allocate(like: Spec) -> Tensor:
    """Return an uninitialized tensor, on huge pages if it is large and the system has them."""
    if like.nbytes < _MIN_HUGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _allocate_plain(like)
    # Private: the default is shared memory, which gets no huge pages.
    pages = mmap.mmap(-1, like.nbytes + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE_PAGE
    # The tensor keeps `pages` alive; the memory before and after it is never touched.
    raw = torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=like.nbytes)
    begin = time.perf_counter()
    raw[0] = 0
    if time.perf_counter() - begin > _SLOW:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return raw.view(like.dtype).view(like.shape)


def clone_bits(x: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor of any dtype; some have no kernel for `x.clone()`."""
    if x.is_quantized:
        return x.clone()
    out = allocate(Spec.of(x))
    copy_into(out, x)
    return out


_SIGNED_ZERO_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
"""The dtypes in which the sign bit alone means -0.0; in others it means a number or NaN."""


@dataclass(frozen=True)
class Zeros:
    """Number of zeros in a tensor."""

    items: int
    zero: int
    """Items whose bits are all zero."""
    negative: int
    """Floats equal to -0.0: zero in arithmetic, but not to a lossless codec."""


def count_zeros(x: Tensor) -> Zeros:
    """Count the zeros of a tensor in main memory."""
    zero, negative = _core.count_zeros(as_bytes(x), x.element_size())
    return Zeros(x.numel(), zero, negative if has_signed_zero(x.dtype) else 0)


def has_signed_zero(dtype: torch.dtype) -> bool:
    """Return True if the sign bit alone means -0.0."""
    return dtype in _SIGNED_ZERO_DTYPES


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of a float tensor."""
    if x.dtype not in KERNEL_FLOATS:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return math.sqrt(_core.sum_of_squares(as_bytes(x), dtype_name(x.dtype)))


def relative_distance(x: Tensor, reference: Tensor) -> float:
    """Return the RMS of `x - reference`, relative to the RMS of `reference`."""
    size = norm(reference)
    if not size:
        return 0.0
    if x.dtype != reference.dtype or reference.dtype not in KERNEL_FLOATS:
        return norm(x.double() - reference.double()) / size
    dtype = dtype_name(reference.dtype)
    return math.sqrt(_core.squared_distance(as_bytes(x), as_bytes(reference), dtype)) / size
