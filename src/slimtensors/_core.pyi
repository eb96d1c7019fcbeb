"""The C++ kernels. Arrays are 1-D, contiguous, uint8, in CPU memory, and never copied or converted.

Sizes and bits are checked, and ValueError says what does not fit. Any other kind of array is a
TypeError. The GIL is released, so calls from several threads run side by side. Items are opaque
patterns of 1, 2, 4, 8 or 16 bytes; zero means all bits zero, so -0.0 is not zero.
"""

from collections.abc import Sequence
from enum import Enum

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Buffer = Tensor | NDArray[np.uint8] | memoryview | bytes
MutableBuffer = Tensor | NDArray[np.uint8] | memoryview | bytearray

def cpu() -> str:
    """Return the code in use, "avx2" or "plain", which SLIMTENSORS_CPU=plain forces."""

def bitmask_find(items: Buffer, itemsize: int, row: int, mask: MutableBuffer) -> int:
    """Mark the nonzero items in `mask`, lowest bit first, and return how many there are.

    Each row of `row` items starts on a new byte, so `mask` has ceil(row / 8) bytes per row, and
    the bits that pad a row are zero.
    """

def bitmask_gather(
    items: Buffer, itemsize: int, row: int, mask: Buffer, values: MutableBuffer
) -> None:
    """Copy the items marked in `mask`, in order, to `values`, which has room for exactly those."""

def bitmask_scatter(
    mask: Buffer, row: int, values: Buffer, itemsize: int, items: MutableBuffer
) -> None:
    """Write `values` to `items` where `mask` has a one, and zeros elsewhere.

    A mask that disagrees with the number of values, or has ones in its padding, is refused before
    anything is written.
    """

def popcount(mask: Buffer) -> int:
    """Return the number of ones in all bytes together."""

def count_zeros(items: Buffer, itemsize: int) -> tuple[int, int]:
    """Return how many items have no bit set, and how many only the top bit (-0.0 in floats)."""

def count_bytes(items: Buffer, itemsize: int, rotated: bool, counts: MutableBuffer) -> None:
    """Count each byte of each plane, as 64-bit numbers: 256 for the lowest plane, and so on.

    If `rotated`, items are rotated left by one bit before.
    """

def group_peaks(items: Buffer, itemsize: int, signed_zero: bool) -> tuple[int, int, int, int]:
    """Return the most items that are not zero in any group of 4, 8, 16 and 32 neighbours.

    With `signed_zero`, an item of which only the top bit is set is zero too.
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
    """Undo `mask24_pack`. Codes it cannot have written are refused; `mask` is then unspecified."""

class Order(Enum):
    """What it means that one number is larger than another."""

    INTEGERS = ...
    """Its bits are, as an unsigned number."""
    FLOATS = ...
    """It is as a float: neighbours differ by one."""
    OUTWARD = ...
    """As floats; a difference is positive if it leads away from zero, seen from the base."""

def difference(
    items: Buffer, base: Buffer, itemsize: int, order: Order, out: MutableBuffer
) -> None:
    """Write how `items` differ from `base`: unsigned numbers of the same width, 0 where equal."""

def add_difference(
    difference: Buffer, base: Buffer, itemsize: int, order: Order, items: MutableBuffer
) -> None:
    """Undo `difference`."""

def group(items: Buffer, by: Buffer, itemsize: int, mantissa: int, out: MutableBuffer) -> None:
    """Sort items by the exponents of the floats in the same places of `by`, keeping their order.

    Items and floats have the same width; `mantissa` is the number of bits below the exponent.
    """

def ungroup(
    grouped: Buffer, by: Buffer, itemsize: int, mantissa: int, items: MutableBuffer
) -> None:
    """Undo `group`."""

HUFFMAN_CHUNK: int
"""Items of a chunk of the functions below, which code bytes in chunks that stand alone.

An item has 1, 2, 4 or 8 bytes, each of which lies in a plane of its own. If `rotated`, items are
rotated left by one bit before, which brings the exponent of a float into its top byte. `rows` has,
for each chunk, 32-bit numbers: its checksum, and how many bytes each of its planes takes.
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
    """Store as surveyed; add the checksums to `rows`. `data` has as many bytes as the rows say."""

def huffman_decode(
    rows: Buffer, data: Buffer, itemsize: int, rotated: bool, items: MutableBuffer
) -> None:
    """Undo `huffman_encode`. Refuse a wrong checksum, size or code; `items` is then unspecified."""

def huffman_decode_again(
    rows: Buffer,
    data: Buffer,
    itemsize: int,
    rotated: bool,
    items: MutableBuffer,
    threads: int,
) -> None:
    """Do the same without comparing checksums, for what `huffman_decode` has taken before."""

BINS_CHUNK: int
"""Items of a chunk of the functions below, which code items as bins, in chunks that share a model.

An item has 1, 2, 4 or 8 bytes; a float has `exponent_bits`, an integer none. `rows` has two 32-bit
numbers for each chunk: its bytes and its checksum.
"""

def bins_model_bound(widths: Sequence[int]) -> int:
    """Return how much room `bins_fit` needs for a model."""

def bins_fit(
    items: Buffer,
    itemsize: int,
    exponent_bits: int,
    is_signed: bool,
    widths: Sequence[int],
    labels: MutableBuffer,
    model: MutableBuffer,
) -> int:
    """Find a model and return its size; 0 if none makes the items smaller.

    `widths` are how many items rows could have. `labels` gets a byte for each row, and has room for
    as many rows as the items could have.
    """

def bins_encode(
    items: Buffer,
    itemsize: int,
    exponent_bits: int,
    is_signed: bool,
    first: int,
    labels: Buffer,
    model: Buffer,
    rows: MutableBuffer,
    data: MutableBuffer,
) -> int:
    """Code chunks of a tensor, from item `first` on, as fitted; return how many bytes that took.

    `labels` are those of all rows of the tensor, and `data` has as much room as the items. Without
    a model, and where coding does not make a chunk smaller, it is a copy.
    """

def bins_decode(
    rows: Buffer, data: Buffer, itemsize: int, first: int, model: Buffer, items: MutableBuffer
) -> None:
    """Undo `bins_encode`. Refuse a wrong checksum, size or model; `items` is then unspecified."""

def crc32c(data: Buffer, seed: int = 0) -> int:
    """Return the CRC-32C of `data`; `seed` is the checksum of the bytes before it."""

def crc32c_join(a: int, b: int, length_b: int) -> int:
    """Return the checksum of two pieces laid end to end, from theirs and the second's length."""

def gaps_bound(mask: Buffer) -> int:
    """Return how many tokens `gaps_encode` needs room for: a little more than the mask has ones."""

def gaps_encode(mask: Buffer, tokens: MutableBuffer) -> int:
    """Write the gaps between the ones of `mask`, lowest bit first; return how many tokens they are.

    A token below 255 means that many zeros, then a one; 255 means 255 zeros. Zeros after the last
    one are not written.
    """

def gaps_decode(tokens: Buffer, mask: MutableBuffer) -> None:
    """Undo `gaps_encode`. Tokens it cannot have written are refused before anything is written."""

def density_fit(
    mask: Buffer, rows: MutableBuffer, columns: MutableBuffer, chances: MutableBuffer
) -> None:
    """Give every row and column of a bit matrix one of 16 classes, and every pair of them a chance.

    `columns` has 8 entries per byte of a row, `rows` one per row, of which the last may be shorter,
    and `chances` 256. Fewer classes are used where more would not pay for themselves.
    """

def density_model_bound(rows_and_columns: int) -> int:
    """Return how much room `density_pack` needs."""

def density_pack(rows: Buffer, columns: Buffer, chances: Buffer, model: MutableBuffer) -> int:
    """Write what `density_fit` found in few bytes, and return how many."""

def density_unpack(
    model: Buffer, rows: MutableBuffer, columns: MutableBuffer, chances: MutableBuffer
) -> None:
    """Undo `density_pack`. A model it cannot have written is refused."""

def density_encode(
    mask: Buffer, rows: Buffer, columns: Buffer, chances: Buffer, coded: MutableBuffer
) -> int:
    """Code whole rows of a bit matrix, given their classes, and return how many bytes that took.

    `coded` has as much room as `mask`. Where coding does not make it smaller, it is a copy.
    """

def density_decode(
    coded: Buffer, rows: Buffer, columns: Buffer, chances: Buffer, mask: MutableBuffer
) -> None:
    """Undo `density_encode`. Most damage is noticed, not all; `mask` is then unspecified."""

def find_ranges(
    items: Buffer, kind: str, row: int, columns: int, low: MutableBuffer, high: MutableBuffer
) -> None:
    """Write the least and the greatest item of every run of `columns` items of a row.

    Here and below, kinds are names of dtypes: items float32, float16 or bfloat16, scales also
    float8_e4m3fn and float8_e8m0fnu. What is not finite lies beyond all numbers.
    """

def quantize(
    items: Buffer,
    kind: str,
    steps: str,
    scales: Buffer,
    scale_kind: str,
    divisor: float,
    zero_points: Buffer,
    blocks: tuple[int, int, int],
    codes_kind: str,
    bits: int,
    codes: MutableBuffer,
) -> bool:
    """Divide by scale over divisor, add the zero point, clamp and round; tell if all was finite.

    `blocks` are the items of a row, and the columns and rows that share a scale. Zero points are
    int8, or none. Codes are "int" (one per byte), "packed" (rows of 32-bit words), "fp4" or "fp8".
    The first two steps round to the kind `steps`.
    """

def dequantize(
    codes: Buffer,
    codes_kind: str,
    bits: int,
    scales: Buffer,
    scale_kind: str,
    divisor: float,
    zero_points: Buffer,
    blocks: tuple[int, int, int],
    kind: str,
    items: MutableBuffer,
) -> None:
    """Subtract the zero point, multiply, and round once, to `kind`."""

def rounding_loss(
    items: Buffer,
    kind: str,
    codes: Buffer,
    codes_kind: str,
    bits: int,
    scales: Buffer,
    scale_kind: str,
    divisor: float,
    zero_points: Buffer,
    blocks: tuple[int, int, int],
) -> tuple[float, float]:
    """Return the squared distance of items from what their codes stand for, and their own squares.

    To the last bit what `squared_distance` and `sum_of_squares` say of a single row.
    """

def pack_codes(codes: Buffer, bits: int, row: int, words: MutableBuffer) -> None:
    """Pack int8 codes without gaps, the lowest one as 0; each row starts on a new 32-bit word."""

def unpack_codes(words: Buffer, bits: int, row: int, codes: MutableBuffer) -> None:
    """Undo `pack_codes`; bits past the end of a row are ignored."""

def sum_of_squares(items: Buffer, kind: str) -> float:
    """Add up the squares of items, float32, float16 or bfloat16, in double precision."""

def squared_distance(items: Buffer, others: Buffer, kind: str) -> float:
    """Add up the squares of the differences between items in the same places."""

def multiply_codes(
    codes: Buffer,
    codes_kind: str,
    bits: int,
    scales: Buffer,
    scale_kind: str,
    divisor: float,
    zero_points: Buffer,
    blocks: tuple[int, int, int],
    inputs: Buffer,
    products: MutableBuffer,
    threads: int,
) -> None:
    """Multiply float32 `inputs` by a weight in codes: int8, 8-bit floats or packed int4.

    `products` has a float32 for each input and row of codes. The number of threads changes none.
    """
