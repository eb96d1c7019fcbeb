"""The C++ kernels. Arrays are 1-D, contiguous, uint8, in CPU memory, and never copied or converted.

Invalid sizes or contents raise ValueError, any other kind of array TypeError. The GIL is released,
so calls from several threads run in parallel. Items are opaque patterns of 1, 2, 4, 8 or 16 bytes;
zero means all bits zero, so -0.0 is not zero.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Buffer = Tensor | NDArray[np.uint8] | memoryview | bytes
MutableBuffer = Tensor | NDArray[np.uint8] | memoryview | bytearray

def cpu() -> str:
    """Return the instruction set in use: "avx512", "avx2" or "plain".

    SLIMTENSORS_CPU=plain or avx2 in the environment forces a lower one.
    """

def bitmask_find(items: Buffer, itemsize: int, row: int, mask: MutableBuffer) -> int:
    """Mark the nonzero items in `mask`, lowest bit first, and return their number.

    Each row of `row` items starts on a new byte, so `mask` has ceil(row / 8) bytes per row, and
    the bits that pad a row are zero.
    """

def bitmask_gather(
    items: Buffer, itemsize: int, row: int, mask: Buffer, values: MutableBuffer
) -> None:
    """Copy the items marked in `mask`, in order, to `values`, which has exactly their size."""

def bitmask_scatter(
    mask: Buffer, row: int, values: Buffer, itemsize: int, items: MutableBuffer
) -> None:
    """Write `values` to `items` where `mask` has a one, and zeros elsewhere.

    Raise ValueError before anything is written if the mask has another number of ones than there
    are values, or ones in its padding.
    """

def popcount(mask: Buffer) -> int:
    """Return the number of ones in all bytes."""

def count_zeros(items: Buffer, itemsize: int) -> tuple[int, int]:
    """Return the number of items without any bit set, and with only the top bit (-0.0)."""

def count_bytes(items: Buffer, itemsize: int, rotated: bool, counts: MutableBuffer) -> None:
    """Write the byte histogram of each plane as 64-bit numbers: 256 for the lowest one, and so on.

    If `rotated`, items are first rotated left by one bit.
    """

def group_peaks(items: Buffer, itemsize: int, signed_zero: bool) -> tuple[int, int, int, int]:
    """Return the maximum number of nonzero items in any group of 4, 8, 16 and 32 consecutive items.

    With `signed_zero`, items with only the top bit set count as zero.
    """

def mask24_fill(mask: MutableBuffer) -> int:
    """Set the lowest clear bits of nibbles with fewer than two ones until they have two; return -1.

    If a nibble has more than two ones, return the index of the first such nibble; `mask` is then
    unspecified.
    """

def mask24_pack(mask: Buffer, codes: MutableBuffer) -> None:
    """Write three nibbles of two ones each as a byte in base 6, the first nibble the lowest digit.

    A digit is the rank of its nibble among 0011, 0101, 0110, 1001, 1010, 1100. `codes` has
    ceil(2 * len(mask) / 3) bytes; digits past the last nibble are 0.
    """

def mask24_unpack(codes: Buffer, mask: MutableBuffer) -> None:
    """Undo `mask24_pack`. Raise ValueError for invalid codes; `mask` is then unspecified."""

class Order(Enum):
    """The order in which differences are counted."""

    INTEGERS = ...
    """Unsigned integers."""
    FLOATS = ...
    """Floats: adjacent floats differ by one."""
    OUTWARD = ...
    """Floats, but a difference is positive if it points away from zero as seen from the base."""

def difference(
    items: Buffer, base: Buffer, itemsize: int, order: Order, out: MutableBuffer
) -> None:
    """Write the differences as unsigned numbers of the same width, 0 where equal."""

def add_difference(
    difference: Buffer, base: Buffer, itemsize: int, order: Order, items: MutableBuffer
) -> None:
    """Undo `difference`."""

def group(items: Buffer, by: Buffer, itemsize: int, mantissa: int, out: MutableBuffer) -> None:
    """Sort items stably by the exponents of the floats at the same positions of `by`.

    Items and floats have the same width; `mantissa` is the number of bits below the exponent.
    """

def ungroup(
    grouped: Buffer, by: Buffer, itemsize: int, mantissa: int, items: MutableBuffer
) -> None:
    """Undo `group`."""

SPARSE_CHUNK: int
"""Items per chunk of the functions below. Arrays have the dtype float32, float16 or bfloat16."""

def sample_changes(items: Buffer, base: Buffer, dtype: str) -> int:
    """Return how many of some evenly spaced items differ, in units of 2^-16."""

def sparse_bound(items: int) -> int:
    """Return the maximum size of a chunk, including what `sparse_encode` writes beyond its end."""

def sparse_fit(items: Buffer, base: Buffer, dtype: str) -> bytes:
    """Return the model for few changes."""

def sparse_encode(
    items: Buffer, base: Buffer, dtype: str, model: Buffer, chunk: MutableBuffer
) -> int:
    """Encode a chunk; return its size, 0 if nothing changed."""

def sparse_decode(
    chunk: Buffer, base: Buffer, dtype: str, model: Buffer, items: MutableBuffer
) -> None:
    """Undo `sparse_encode`. Raise ValueError for invalid data; `items` is then unspecified."""

EXPECTED_CHUNK: int
"""Items per chunk of the functions below."""

def expected_fit(items: Buffer, base: Buffer, dtype: str, width: int) -> bytes:
    """Return the model for many changes of arrays with rows of `width` items."""

class ExpectedModel:
    """A model for many changes, ready to code an array of `items` items."""

    def __init__(self, model: Buffer, dtype: str, items: int) -> None:
        """Parse a model; raise ValueError if it is invalid."""

    def chunk_bound(self, items: int) -> int:
        """Return the maximum size of a chunk."""

    def encode(self, first: int, items: Buffer, base: Buffer, chunk: MutableBuffer) -> int:
        """Encode the items from `first` on; return the size of the chunk."""

    def decode(self, first: int, chunk: Buffer, base: Buffer, items: MutableBuffer) -> None:
        """Undo `encode`. Raise ValueError for invalid data; `items` is then unspecified."""

HUFFMAN_CHUNK: int
"""Items per chunk of the functions below, which code bytes in independent chunks.

An item has 1, 2, 4 or 8 bytes, each in a plane of its own. If `rotated`, items are first rotated
left by one bit, which moves the exponent of a float into its top byte. `rows` has 32-bit numbers
for each chunk: its checksum, and the size of each of its planes in bytes.
"""

def huffman_survey(
    items: Buffer, itemsize: int, rotated: bool, codes: MutableBuffer, rows: MutableBuffer
) -> None:
    """Decide how to store each plane of each chunk: write its size, and 256 bytes of `codes`."""

def huffman_encode(
    items: Buffer,
    itemsize: int,
    rotated: bool,
    codes: Buffer,
    rows: MutableBuffer,
    data: MutableBuffer,
) -> None:
    """Encode as surveyed and add checksums to `rows`. `data` has the size given by the rows."""

def huffman_decode(
    rows: Buffer, data: Buffer, itemsize: int, rotated: bool, items: MutableBuffer
) -> None:
    """Undo `huffman_encode`. Raise ValueError for invalid data; `items` is then unspecified."""

def huffman_decode_again(
    rows: Buffer,
    data: Buffer,
    itemsize: int,
    rotated: bool,
    items: MutableBuffer,
    threads: int,
) -> None:
    """Decode without comparing checksums, for data that `huffman_decode` accepted before."""

BINS_CHUNK: int
"""Items per chunk of the functions below, which code items as bins, in chunks that share a model.

`rows` has two 32-bit numbers for each chunk: its size in bytes and its checksum.
"""

class TrellisCounts:
    """Numbers of occurrences of small integers, by class."""

    def __init__(self) -> None: ...

def trellis_fit(counts: TrellisCounts, start: Buffer, parameters: MutableBuffer) -> None:
    """Write the parameters of the distribution with the fewest bits, searching from `start`."""

def trellis_measure(counts: TrellisCounts, parameters: Buffer) -> float:
    """Return the bits of the counted integers, coded with the distribution of `parameters`."""

def trellis_pack(values: Buffer) -> bytes:
    """Return a short form of 16-bit integers that differ by less than 4096."""

def trellis_unpack(packed: Buffer, values: MutableBuffer) -> int:
    """Read as many integers as `values` has room for; return the number of bytes used."""

class TrellisMatrix:
    """Steps, classes and distribution of a matrix. `first` is the first row of a piece."""

    def __init__(
        self,
        parameters: Buffer,
        row_steps: Buffer,
        column_steps: Buffer,
        row_classes: Buffer,
        column_classes: Buffer,
    ) -> None: ...
    def chunk_bound(self, rows: int) -> int:
        """Return the size that `encode` requires for its output."""

    def quantize(
        self,
        first: int,
        weights: Buffer,
        factor: Buffer,
        order: Buffer,
        price_of_bit: float,
        keep_zeros: bool,
        integers: MutableBuffer,
    ) -> None:
        """Choose 32-bit integers for 32-bit floats; `factor` and `order` may be empty."""

    def count(self, first: int, integers: Buffer, counts: TrellisCounts) -> None:
        """Add the integers of some rows to `counts`."""

    def encode(self, first: int, integers: Buffer, chunk: MutableBuffer) -> int:
        """Encode the integers of some rows and return the number of bytes written."""

    def decode(self, first: int, chunk: Buffer, dtype: str, items: MutableBuffer) -> None:
        """Decode some rows to items of a dtype: float32, float16 or bfloat16."""

class ItemType:
    """Items of 1, 2, 4 or 8 bytes: floats with `exponent_bits`, or integers, which have none."""

    def __init__(self, *, itemsize: int, exponent_bits: int, is_signed: bool) -> None: ...

def bins_model_bound(widths: Sequence[int]) -> int:
    """Return the size that `bins_fit` requires for `model`."""

def bins_fit(
    items: Buffer,
    type: ItemType,
    widths: Sequence[int],
    labels: MutableBuffer,
    model: MutableBuffer,
) -> int:
    """Find a model and return its size; 0 if none makes the items smaller.

    `widths` are possible row lengths in items. `labels` receives one byte per row and has room for
    the rows of the smallest width.
    """

def bins_encode(
    items: Buffer,
    type: ItemType,
    first: int,
    labels: Buffer,
    model: Buffer,
    rows: MutableBuffer,
    data: MutableBuffer,
) -> int:
    """Encode chunks of a tensor, starting at item `first`, and return the number of bytes written.

    `labels` are those of all rows of the tensor, and `data` is as large as the items. Without a
    model, and where coding does not make a chunk smaller, the chunk is copied.
    """

def bins_decode(
    rows: Buffer, data: Buffer, itemsize: int, first: int, model: Buffer, items: MutableBuffer
) -> None:
    """Undo `bins_encode`. Raise ValueError for invalid data; `items` is then unspecified."""

def crc32c(data: Buffer, seed: int = 0) -> int:
    """Return the CRC-32C of `data`; `seed` is the checksum of the preceding bytes."""

def crc32c_join(a: int, b: int, length_b: int) -> int:
    """Return the checksum of a concatenation from both checksums and the second's length."""

def gaps_bound(mask: Buffer) -> int:
    """Return the size that `gaps_encode` requires: slightly more than the number of ones."""

def gaps_encode(mask: Buffer, tokens: MutableBuffer) -> int:
    """Write the gaps between the ones of `mask`, lowest bit first; return the number of tokens.

    A token below 255 means that many zeros, then a one; 255 means 255 zeros. Zeros after the last
    one are not written.
    """

def gaps_decode(tokens: Buffer, mask: MutableBuffer) -> None:
    """Undo `gaps_encode`. Raise ValueError for invalid tokens before anything is written."""

def density_fit(
    mask: Buffer, rows: MutableBuffer, columns: MutableBuffer, chances: MutableBuffer
) -> None:
    """Assign one of 16 classes to every row and column of a bit matrix; fit their probabilities.

    `columns` has 8 entries per byte of a row, `rows` one per row, of which the last may be shorter,
    and `chances` 256. Fewer classes are used where more would cost more than they save.
    """

def density_model_bound(rows_and_columns: int) -> int:
    """Return the size that `density_pack` requires for `model`."""

def density_pack(rows: Buffer, columns: Buffer, chances: Buffer, model: MutableBuffer) -> int:
    """Write the result of `density_fit` in compact form and return its size."""

def density_unpack(
    model: Buffer, rows: MutableBuffer, columns: MutableBuffer, chances: MutableBuffer
) -> None:
    """Undo `density_pack`. Raise ValueError for an invalid model."""

def density_encode(
    mask: Buffer, rows: Buffer, columns: Buffer, chances: Buffer, coded: MutableBuffer
) -> int:
    """Encode rows of a bit matrix with the given classes and return the number of bytes written.

    `coded` is as large as `mask`. If coding does not make the mask smaller, it is copied.
    """

def density_decode(
    coded: Buffer, rows: Buffer, columns: Buffer, chances: Buffer, mask: MutableBuffer
) -> None:
    """Undo `density_encode`. Most invalid data raises ValueError; `mask` is then unspecified."""

def find_ranges(
    items: Buffer, dtype: str, row: int, columns: int, low: MutableBuffer, high: MutableBuffer
) -> None:
    """Write the minimum and maximum of every run of `columns` items of a row.

    `dtype` is float32, float16 or bfloat16. Infinity and NaN compare beyond all
    numbers.
    """

class CodeFormat:
    """Codes of 1 to 8 bits.

    `kind` is "int" (one per byte), "packed" (rows of 32-bit words), "fp4" (two per byte) or "fp8".
    """

    def __init__(self, kind: str, bits: int) -> None: ...

class Scales:
    """Scales and zero points of a matrix, which are referenced, not copied.

    `dtype` is float32, float16, bfloat16, float8_e4m3fn or float8_e8m0fnu. `blocks` is the number
    of items per row, and the number of columns and of rows that share a scale. Each scale is
    divided by `divisor`. Zero points are int8.
    """

    def __init__(
        self,
        values: Buffer,
        dtype: str,
        blocks: tuple[int, int, int],
        *,
        divisor: float = 1.0,
        zero_points: Buffer | None = None,
    ) -> None: ...

def quantize(
    items: Buffer,
    codes: MutableBuffer,
    *,
    dtype: str,
    compute_dtype: str,
    scales: Scales,
    format: CodeFormat,
) -> bool:
    """Divide, add the zero point, clamp and round; return True if all items are finite.

    The first two results are rounded to `compute_dtype`.
    """

def dequantize(
    codes: Buffer, items: MutableBuffer, *, dtype: str, scales: Scales, format: CodeFormat
) -> None:
    """Subtract the zero point, multiply, and round once, to `dtype`."""

def rounding_loss(
    items: Buffer, codes: Buffer, *, dtype: str, scales: Scales, format: CodeFormat
) -> tuple[float, float]:
    """Return the squared distance between items and their codes, and the sum of squared items.

    Bitwise equal to `squared_distance` and `sum_of_squares` of a single row.
    """

def pack_codes(codes: Buffer, bits: int, row: int, words: MutableBuffer) -> None:
    """Pack int8 codes without gaps, the lowest one as 0; each row starts on a new 32-bit word."""

def unpack_codes(words: Buffer, bits: int, row: int, codes: MutableBuffer) -> None:
    """Undo `pack_codes`; bits past the end of a row are ignored."""

def sum_of_squares(items: Buffer, dtype: str) -> float:
    """Return the sum of squares of float32, float16 or bfloat16 items in double precision."""

def squared_distance(items: Buffer, others: Buffer, dtype: str) -> float:
    """Return the sum of squares of the differences between corresponding items."""

def multiply_codes(
    inputs: Buffer,
    codes: Buffer,
    products: MutableBuffer,
    *,
    scales: Scales,
    format: CodeFormat,
    threads: int,
) -> None:
    """Multiply float32 `inputs` by a weight in codes: int8, 8-bit floats or packed int4.

    `products` has a float32 for each input and row of codes. The result does not depend on the
    number of threads.
    """
