"""Tensors as dtype, shape and bytes; floats that NumPy lacks as their bits."""

import math
from dataclasses import dataclass

import numpy as np


class DamagedError(ValueError):
    """The file breaks the format."""


def check(condition, problem):
    """Raise `DamagedError` unless `condition` is true."""
    if not condition:
        raise DamagedError(problem)


ITEM_BYTES = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32", "qint32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16", "bits16"), 2),
    "complex128": 16,
}
"""Bytes of an element; all other dtypes have one."""

SAFETENSORS = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
}
"""Names in the headers of files, and torch's names."""

_MANTISSA = {
    "float64": 52,
    "float32": 23,
    "float16": 10,
    "bfloat16": 7,
    "float8_e4m3fn": 3,
    "float8_e5m2": 2,
}


@dataclass(frozen=True)
class Tensor:
    """A tensor in row-major order."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self):
        check(len(self.data) == self.count * self.item_bytes, f"wrong size for {self.dtype}")

    @property
    def count(self):
        """Number of items."""
        return math.prod(self.shape)

    @property
    def item_bytes(self):
        """Bytes of an item."""
        return ITEM_BYTES.get(self.dtype, 1)

    def words(self):
        """Return the bits of the items as unsigned numbers, flat."""
        return np.frombuffer(self.data, f"<u{self.item_bytes}")

    def numbers(self):
        """Return the items as NumPy's numbers, flat; small floats as `float32`."""
        if self.dtype == "bfloat16":
            return bfloat16_to_float32(self.words())
        if self.dtype == "float8_e4m3fn":
            return e4m3_to_float32(self.words())
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<"))

    def reshape(self, *shape):
        """Return the same items in another shape."""
        return Tensor(self.dtype, tuple(shape), self.data)


def from_words(dtype, shape, words):
    """Return the tensor with these bits."""
    return Tensor(dtype, tuple(shape), np.ascontiguousarray(words).tobytes())


def from_numbers(dtype, shape, numbers):
    """Return numbers rounded to a dtype, to nearest, ties to even."""
    if dtype == "bfloat16":
        return from_words(dtype, shape, float32_to_bfloat16(np.asarray(numbers, np.float32)))
    with np.errstate(over="ignore"):
        return from_words(dtype, shape, np.asarray(numbers).astype(np.dtype(dtype)))


def bfloat16_to_float32(words):
    """Return the numbers: bfloat16 is the upper half of float32."""
    return (words.astype(np.uint32) << 16).view(np.float32)


def float32_to_bfloat16(numbers):
    """Return the bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


def e4m3_to_float32(words):
    """Return the numbers: sign, 4 bits of exponent (bias 7), 3 of mantissa, NaN for all ones."""
    sign = np.where(words & 0x80, np.float32(-1), np.float32(1))
    exponent, mantissa = (words >> 3 & 15).astype(np.int32), (words & 7).astype(np.float32)
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    numbers = sign * np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    return np.where(words & 0x7F == 0x7F, np.float32(np.nan), numbers).astype(np.float32)


def exponents(tensor):
    """Return the exponent fields of the floats, unsigned."""
    bits = 8 * tensor.item_bytes
    mantissa = _MANTISSA[tensor.dtype]
    field = (1 << bits - 1 - mantissa) - 1
    return tensor.words() >> np.uint64(mantissa) & np.uint64(field)


def is_float(dtype):
    """Return True for floats."""
    return dtype.startswith(("float", "bfloat"))
