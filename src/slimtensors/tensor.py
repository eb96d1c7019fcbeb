"""Tensors without files: specs, dtype names, byte views, bitwise comparison, allocation."""

import math
import mmap
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.errors import FormatError, UnsupportedTensorError

Json = dict[str, Any]

Parts = dict[str, Tensor]
"""Named plain tensors: all that a codec may emit."""

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
"""Every dtype that can be stored, by the name torch gives it."""

QUANTIZED_DTYPES = {torch.qint8: torch.int8, torch.quint8: torch.uint8, torch.qint32: torch.int32}
"""The quantized dtypes of torch that can be stored, and those of their integers."""

_NAMED = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in QUANTIZED_DTYPES}
_NAMES = {dtype: name for name, dtype in _NAMED.items()}


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
        """Describe `x`."""
        return cls(x.dtype, tuple(x.shape))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the plain tensor."""
        return self.numel * self.dtype.itemsize

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"dtype": _NAMES[self.dtype], "shape": list(self.shape)}

    @classmethod
    def from_json(cls, data: Json) -> "Spec":
        """Parse the JSON form; raise `FormatError` when it is not one."""
        try:
            dtype = _NAMED[data["dtype"]]
        except (KeyError, TypeError):
            raise FormatError(f"unknown dtype {str(data.get('dtype'))[:80]!r}") from None
        return cls(dtype, parse_shape(data.get("shape")))


def parse_shape(data: object) -> tuple[int, ...]:
    """Check that `data` is a list of sizes that torch can hold, and return it as a tuple."""
    if not isinstance(data, list) or len(data) > 64:
        raise FormatError(f"not a shape: {str(data)[:80]}")
    items = 1
    for n in data:
        if type(n) is not int or n < 0:  # not isinstance: True is an int
            raise FormatError(f"not a shape: {str(data)[:80]}")
        items *= n or 1
    if items >= 1 << 58:  # in bytes, what a signed 64-bit number can still say
        raise FormatError(f"a shape past all memory: {str(data)[:80]}")
    return tuple(data)


def is_valid_text(text: str) -> bool:
    """Tell whether a string has only whole characters: JSON can say half ones, files cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def find_dtype(name: str) -> torch.dtype:
    """Return the dtype that files call `name`; raise `KeyError` if there is none."""
    return _NAMED[name]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that files use for `dtype`."""
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
    if x.dim() != 1 or x.stride(0) != 1:  # which it need not be with no or one item
        x = x.as_strided((x.numel(),), (1,))
    return x if x.dtype is torch.uint8 else x.view(torch.uint8)


_COMPARED = 1 << 18
"""Bytes that are compared at once."""


def bitwise_equal(x: Tensor, y: Tensor) -> bool:
    """Tell whether two tensors in main memory, of the same dtype and shape, are the same bits.

    By numpy and in pieces: torch would wake threads of its own for what the first items tell.
    """
    a, b = as_bytes(x).numpy(), as_bytes(y).numpy()
    pieces = (slice(i, i + _COMPARED) for i in range(0, a.size, _COMPARED))
    return all(np.array_equal(a[piece], b[piece]) for piece in pieces)


def copy_into(target: Tensor, source: Tensor) -> None:
    """Copy all items, cast if the dtypes differ."""
    if target.dtype == source.dtype:  # as words: some dtypes have no copy kernel
        words = _WORDS[source.element_size()]
        target, source = target.view(words), source.view(words)
    target.copy_(source)


def _allocate_plain(spec: Spec) -> Tensor:
    """Return a tensor of this kind with any content."""
    if spec.dtype is torch.complex32:  # torch warns whoever asks for one
        return torch.empty(spec.shape, dtype=torch.int32).view(torch.complex32)
    return torch.empty(spec.shape, dtype=spec.dtype)


def view_as(raw: memoryview, spec: Spec) -> Tensor:
    """View as many bytes as `spec` needs as a tensor. Copies only if they are not aligned."""
    if spec.dtype in QUANTIZED_DTYPES:
        raise FormatError(f"bytes alone do not make a tensor of {spec.dtype}")
    if not raw:
        return _allocate_plain(spec)
    x = torch.frombuffer(raw, dtype=spec.dtype)
    if x.data_ptr() % spec.dtype.itemsize:
        x = torch.frombuffer(bytearray(raw), dtype=spec.dtype)
    return x if len(spec.shape) == 1 else x.view(spec.shape)


def check_storable(name: str, x: object) -> Tensor:
    """Return `x` as a plain tensor, or raise an error that names it."""
    if not isinstance(x, Tensor):
        raise UnsupportedTensorError(f"{name}: a {type(x).__name__} is not a tensor")
    if x.is_nested:
        raise UnsupportedTensorError(f"{name}: is a nested tensor; store its parts")
    if x.layout is not torch.strided:
        raise UnsupportedTensorError(f"{name}: has layout {x.layout}; store x.to_dense()")
    if x.dtype not in _NAMES:
        raise UnsupportedTensorError(f"{name}: tensors of {x.dtype} cannot be stored")
    if type(x) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        raise UnsupportedTensorError(f"{name}: tensor type {type(x).__name__} cannot be stored")
    if x.is_meta:
        raise UnsupportedTensorError(f"{name}: is on the meta device and has no data")
    if _extent(x) > x.untyped_storage().nbytes():
        raise UnsupportedTensorError(f"{name}: its memory has been freed, or some of it")
    return x


def _extent(x: Tensor) -> int:
    """Return how many bytes of its storage a tensor reaches."""
    if x.is_contiguous():
        return int(x.storage_offset() + x.numel()) * x.element_size() if x.numel() else 0
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return int(x.storage_offset() + last + 1) * x.element_size()


def to_cpu(x: Tensor) -> Tensor:
    """Return the plain data of `x` in main memory: no gradient, no lazy conjugate or negative."""
    x = x.detach()
    if x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg()
    return x.cpu()


_HUGE = 2 << 20
_SLOW = 0.001
"""Seconds to get the first huge page from which on small ones are faster. Clearing one takes a
fifth of that, but a virtual machine may have to get the memory back from its host first."""
_WORTHWHILE = 2 * _HUGE
"""Smaller results come from torch's allocator, which reuses pages it already has."""


_kept = threading.local()


def scratch(nbytes: int) -> Tensor:
    """Return memory that the next call on the same thread may return again."""
    room: Tensor | None = getattr(_kept, "room", None)
    if room is None or room.nbytes < nbytes:
        room = _kept.room = allocate(Spec(torch.uint8, (nbytes,)))
    return room


def allocate(like: Spec) -> Tensor:
    """Allocate a tensor, on huge pages where it is large and the system has them."""
    if like.nbytes < _WORTHWHILE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return _allocate_plain(like)
    # Private, because the module's default is shared memory, which gets no huge pages.
    pages = mmap.mmap(-1, like.nbytes + _HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % _HUGE
    # The tensor keeps `pages` alive; what lies before and after it is never touched.
    raw = torch.frombuffer(pages, dtype=torch.uint8, offset=start, count=like.nbytes)
    begin = time.perf_counter()
    raw[0] = 0
    if time.perf_counter() - begin > _SLOW:
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return raw.view(like.dtype).view(like.shape)


def norm(x: Tensor) -> float:
    """Return the Euclidean norm of a tensor of floats."""
    if x.dtype not in KERNEL_FLOATS:
        return float(torch.linalg.vector_norm(x, dtype=torch.float64))
    return math.sqrt(_core.sum_of_squares(as_bytes(x), dtype_name(x.dtype)))


def relative_distance(found: Tensor, given: Tensor) -> float:
    """Return the RMS of the difference of two tensors, relative to the RMS of the second."""
    whole = norm(given)
    if not whole:
        return 0.0
    if found.dtype != given.dtype or given.dtype not in KERNEL_FLOATS:
        return norm(found.double() - given.double()) / whole
    kind = dtype_name(given.dtype)
    return math.sqrt(_core.squared_distance(as_bytes(found), as_bytes(given), kind)) / whole
