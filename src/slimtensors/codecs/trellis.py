"""Matrices rounded by dependent quantization, at any number of bits per weight."""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.protocol import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import (
    Parts,
    Spec,
    allocate,
    as_bytes,
    ceil_div,
    concatenate,
    dtype_name,
    empty_bytes,
)

PRICE_OF_BIT = 0.37
"""Squared steps that a bit is worth: the slope of error over size at the usual rates."""

ROUNDED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_CHUNK = 1 << 18
"""Weights per chunk: enough to amortize the coder's states, few enough for a core's cache."""
_MIN_ROWS = 32
_HEAD = struct.Struct("<8sI")
_ROW = 8
"""Bytes of a chunk's table row: its size and its checksum."""
_CLASSES_PER_OCTAVE = 4
_CLASS_OF_ONE = 12
"""Class of weights whose mean magnitude is one step."""
_FINENESS = 6
"""Index of the fineness of row steps among the parameters."""
_START = np.array([15, 32, 0, 0, 0, 0, 0, 0], np.int8).tobytes()
"""Parameters from which the search for a distribution starts: a normal one."""
_MIN_STEP, _MAX_STEP = -126 * 8, 127 * 8


@register
@dataclass(frozen=True)
class Trellis:
    """Round a matrix to multiples of a step, chosen along each column for few bits. Lossy.

    Integers are coded by their frequencies given the magnitude of their row and column. Zeros may
    become nonzero and nonzero weights zero.
    """

    name: ClassVar[str] = "trellis"
    part_names: ClassVar[tuple[str, ...]] = ("steps", "stream")
    lossy: ClassVar[bool] = True

    step: float = 0.25
    """Step in units of the RMS of the tensor. Half of it costs about a bit per weight."""
    row_dims: int = 1
    """Number of leading dimensions whose indices are rows; the others are columns."""
    transposed: bool = False
    """Whether the last two dimensions are exchanged first: for `[inputs, outputs]`."""

    def __post_init__(self) -> None:
        if not isinstance(self.step, int | float) or not 0.01 <= self.step <= 10:
            raise ConfigError(f"step must be a number from 0.01 to 10, got {self.step!r}")
        if not isinstance(self.row_dims, int) or not 1 <= self.row_dims <= 8:
            raise ConfigError(f"row_dims must be an integer from 1 to 8, got {self.row_dims!r}")

    def to_matrix(self, x: Tensor) -> Tensor:
        """Return a tensor as a float32 matrix; raise `ConfigError` if it cannot be rounded."""
        if x.dtype not in ROUNDED_DTYPES:
            raise ConfigError(f"{x.dtype} cannot be rounded; expected bfloat16, float16 or float32")
        if not x.numel():
            raise ConfigError(f"an empty tensor of shape {tuple(x.shape)} cannot be rounded")
        x = x.detach()
        if self.transposed:
            if x.dim() < 2:
                raise ConfigError(f"a tensor of shape {tuple(x.shape)} cannot be transposed")
            x = x.transpose(-1, -2)
        weights = x.reshape(_matrix_shape(tuple(x.shape), self.row_dims)).float().contiguous()
        if not weights.isfinite().all():
            raise ConfigError("NaN and infinity cannot be rounded")
        return weights

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Round with the same step everywhere and return `steps` and `stream`."""
        weights = self.to_matrix(x)
        rms = weights.double().square().mean().sqrt()
        step = float(rms) * self.step if float(rms) else 1.0
        rows, columns = weights.shape
        return encode_matrix(weights, Steps(torch.full((rows,), step), torch.ones(columns)), each)

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Decode every chunk and compare its checksum."""
        out = allocate(like)
        self.decode_into(parts, out, each)
        return out

    def decode_into(self, parts: Parts, out: Tensor, each: Each = serially) -> None:
        """Decode into the memory of `out`."""
        stream = self.parse(parts, Spec.of(out))
        if not self.transposed:
            stream.decode_all(out, each)
            return
        matrix = allocate(stream.like)
        stream.decode_all(matrix, each)
        out.copy_(matrix.transpose(-1, -2))

    def decode_range(self, parts: Parts, like: Spec, begin: int, end: int) -> Tensor:
        """Return items `begin` to `end` of the flat tensor, decoding only their chunks.

        A transposed tensor is decoded as a whole.
        """
        if not 0 <= begin <= end <= like.numel:
            raise IndexError(f"items {begin} to {end} are out of range for {like.numel} items")
        if begin == end:
            return torch.empty(0, dtype=like.dtype)
        if self.transposed:
            return self.decode(parts, like).view(-1)[begin:end].clone()
        stream = self.parse(parts, like)
        chunks = range(begin // stream.chunk_items, ceil_div(end, stream.chunk_items))
        first = chunks.start * stream.chunk_items
        pieces = [stream.decode_chunk(i) for i in chunks]
        return torch.cat(pieces)[begin - first : end - first]

    def parse(self, parts: Parts, like: Spec) -> "_Stream":
        """Return the stream of a tensor in the layout in which it is coded."""
        shape = tuple(like.shape)
        if self.transposed:
            if len(shape) < 2:
                raise CorruptFileError(f"a tensor {like} cannot be transposed")
            shape = (*shape[:-2], shape[-1], shape[-2])
        return _Stream.parse(parts, Spec(like.dtype, shape), self.row_dims)


@dataclass(frozen=True)
class Steps:
    """How a matrix is rounded: the step of weight (i, j) is `rows[i] * columns[j]`.

    Steps are rounded to eighths of an octave. With a `factor`, the error of a column is compensated
    by the columns after it, as in GPTQ.
    """

    rows: Tensor
    columns: Tensor
    factor: Tensor | None = None
    """Upper Cholesky factor of the inverse Hessian, float32, columns in the given order."""
    order: Tensor | None = None
    """Order in which columns are rounded; left to right if None."""
    price_of_bit: float = PRICE_OF_BIT
    keep_zeros: bool = False
    """Whether weights that are zero stay zero."""
    row_fineness: int = 0
    """How often the unit of row steps, an eighth of an octave, is halved."""


@dataclass
class Rounded:
    """The integers of a matrix, and all that describes them."""

    parameters: bytes
    vectors: tuple[Tensor, Tensor, Tensor, Tensor]
    """Steps of rows and columns, classes of rows and columns: int16."""
    chunk_rows: int
    integers: Tensor
    """int32, of the shape of the matrix."""
    matrix: "_core.TrellisMatrix" = field(repr=False)
    bits: float
    """Size of the coded integers, without steps and chunk tables."""

    def encode(self, each: Each = serially) -> Parts:
        """Return the parts."""
        chunks = _split(len(self.integers), self.chunk_rows)

        def encode_chunk(i: int) -> Tensor:
            chunk = chunks[i]
            out = empty_bytes(self.matrix.chunk_bound(len(chunk)))
            integers = as_bytes(self.integers[chunk.start : chunk.stop])
            return out[: self.matrix.encode(chunk.start, integers, out)].clone()

        head = _HEAD.pack(self.parameters, self.chunk_rows)
        return _join(head, self.vectors, each(encode_chunk, len(chunks)))


def round_matrix(
    weights: Tensor,
    steps: Steps,
    each: Each = serially,
    *,
    passes: int = 2,
    parameters: bytes = _START,
) -> Rounded:
    """Choose the integers of a float32 matrix.

    The prices of integers depend on their frequencies, which depend on the prices; each pass uses
    those of the pass before, and the first one those of `parameters`.
    """
    rows, columns = weights.shape
    fineness = steps.row_fineness
    parameters = parameters[:_FINENESS] + bytes([fineness]) + parameters[_FINENESS + 1 :]
    row_codes, column_codes = _step_codes(steps.rows, fineness), _step_codes(steps.columns)
    sizes = weights.abs() / _step_sizes(row_codes, fineness)[:, None] / _step_sizes(column_codes)
    row_classes, column_classes = _find_classes(sizes)
    vectors = (row_codes, column_codes, row_classes, column_classes)
    chunk_rows = min(rows, max(_MIN_ROWS, _CHUNK // columns))
    chunks = _split(rows, chunk_rows)
    factor = empty_bytes(0) if steps.factor is None else as_bytes(steps.factor)
    order = empty_bytes(0) if steps.order is None else as_bytes(steps.order.to(torch.int32))
    integers = torch.empty(rows, columns, dtype=torch.int32)
    bits = 0.0
    for _ in range(passes):
        matrix = _core.TrellisMatrix(_bytes(parameters), *map(as_bytes, vectors))

        def round_chunk(i: int, matrix: "_core.TrellisMatrix" = matrix) -> None:
            chunk = slice(chunks[i].start, chunks[i].stop)
            matrix.quantize(
                chunk.start,
                as_bytes(weights[chunk]),
                factor,
                order,
                steps.price_of_bit,
                steps.keep_zeros,
                as_bytes(integers[chunk]),
            )

        each(round_chunk, len(chunks))
        counts = _core.TrellisCounts()
        for chunk in chunks:
            matrix.count(chunk.start, as_bytes(integers[chunk.start : chunk.stop]), counts)
        fitted = bytearray(8)
        _core.trellis_fit(counts, _bytes(parameters), fitted)
        parameters = bytes(fitted)
        bits = _core.trellis_measure(counts, _bytes(parameters))
    matrix = _core.TrellisMatrix(_bytes(parameters), *map(as_bytes, vectors))
    return Rounded(parameters, vectors, chunk_rows, integers, matrix, bits)


def encode_matrix(weights: Tensor, steps: Steps, each: Each = serially) -> Parts:
    """Round a float32 matrix and return its parts."""
    return round_matrix(weights, steps, each).encode(each)


def scale_rows(parts: Parts, codec: Trellis, like: Spec, factors: Tensor) -> Parts:
    """Return parts with each row multiplied by a factor, as exactly as row steps allow."""
    stream = codec.parse(parts, like)
    steps = as_bytes(parts["steps"])
    head = bytes(steps[: _HEAD.size].numpy())
    rows, *others = _unpack(steps[_HEAD.size :], stream.vector_sizes)
    fineness = head[_FINENESS]
    scaled = _step_codes(_step_sizes(rows, fineness) * factors, fineness)
    return _join(head, (scaled, *others), [stream.data[x] for x in stream.ranges])


def _join(head: bytes, vectors: Sequence[Tensor], chunks: Sequence[Tensor]) -> Parts:
    """Return the parts of a tensor."""
    steps = b"".join([head, *(_core.trellis_pack(as_bytes(vector)) for vector in vectors)])
    seed = _core.crc32c(steps)
    table = [(chunk.numel(), _core.crc32c(chunk, seed)) for chunk in chunks]
    lines = torch.from_numpy(np.array(table, "<u4").reshape(-1, 2)).view(torch.uint8).view(-1)
    return {
        "steps": torch.frombuffer(bytearray(steps), dtype=torch.uint8),
        "stream": concatenate([lines, *chunks]),
    }


def _find_classes(sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the classes of rows and columns, given the magnitudes of weights in steps."""
    tiny = 1e-3
    # A few huge weights must not raise the class of all others in their row and column.
    sizes = sizes.clamp(max=32 * (float(sizes.median()) + 1))
    total = float(sizes.mean()) + tiny
    rows = _CLASSES_PER_OCTAVE * torch.log2(sizes.mean(1) + tiny)
    columns = _CLASSES_PER_OCTAVE * torch.log2((sizes.mean(0) + tiny) / total) + _CLASS_OF_ONE
    return rows.round().to(torch.int16), columns.round().to(torch.int16)


def _step_codes(steps: Tensor, fineness: int = 0) -> Tensor:
    """Return the nearest steps, as eighths of an octave or a fraction of that."""
    if not bool((steps > 0).all()):
        raise ConfigError("steps must be positive")
    unit = 1 << fineness
    codes = (8 * unit * torch.log2(steps.double())).round()
    return codes.clamp(_MIN_STEP * unit, _MAX_STEP * unit).to(torch.int16)


def _step_sizes(codes: Tensor, fineness: int = 0) -> Tensor:
    return torch.exp2(codes.double() / (8 << fineness)).float()


def _matrix_shape(shape: Sequence[int], row_dims: int = 1) -> tuple[int, int]:
    """Return rows and columns; a vector is a single row."""
    rows = math.prod(shape[:row_dims]) if len(shape) > row_dims else 1
    return rows, math.prod(shape) // rows if rows else 0


def _split(rows: int, chunk_rows: int) -> list[range]:
    return [range(i, min(i + chunk_rows, rows)) for i in range(0, rows, chunk_rows)]


def _bytes(data: bytes) -> memoryview:
    return memoryview(data)


@dataclass(frozen=True)
class _Stream:
    """The parsed parts of a tensor."""

    like: Spec
    chunk_rows: int
    columns: int
    rows: int
    seed: int
    table: "np.ndarray[tuple[int, int], np.dtype[np.uint32]]"
    ranges: Sequence[slice]
    data: Tensor
    matrix: "_core.TrellisMatrix" = field(repr=False)

    @classmethod
    def parse(cls, parts: Parts, like: Spec, row_dims: int) -> "_Stream":
        for name in ("steps", "stream"):
            if parts[name].dtype is not torch.uint8 or parts[name].dim() != 1:
                raise CorruptFileError(f"{name} is not a flat uint8 tensor")
        if like.dtype not in ROUNDED_DTYPES or not like.numel:
            raise CorruptFileError(f"a tensor {like} cannot be coded by trellis")
        steps, stream = as_bytes(parts["steps"]), as_bytes(parts["stream"])
        rows, columns = _matrix_shape(like.shape, row_dims)
        if steps.numel() < _HEAD.size:
            raise CorruptFileError(f"steps of {steps.numel()} bytes are too short")
        parameters, chunk_rows = _HEAD.unpack(bytes(steps[: _HEAD.size].numpy()))
        chunks = ceil_div(rows, chunk_rows) if 0 < chunk_rows <= rows else 0
        if not chunks or stream.numel() < _ROW * chunks:
            raise CorruptFileError(f"{chunk_rows} rows per chunk do not fit {rows} rows")
        if 64 * (steps.numel() + stream.numel()) < rows + columns:  # before allocating any vector
            raise CorruptFileError(f"{steps.numel()} bytes are too short for {rows} rows")
        table = np.frombuffer(bytes(stream[: _ROW * chunks].numpy()), "<u4").reshape(-1, 2)
        data = stream[_ROW * chunks :]
        ends = list(accumulate((int(n) for n in table[:, 0]), initial=0))
        if ends[-1] != data.numel():
            raise CorruptFileError(f"expected {ends[-1]} bytes of chunks, got {data.numel()}")
        try:
            vectors = _unpack(steps[_HEAD.size :], (rows, columns, rows, columns))
            matrix = _core.TrellisMatrix(_bytes(parameters), *map(as_bytes, vectors))
        except ValueError as error:
            raise CorruptFileError(str(error)) from error
        ranges = [slice(a, b) for a, b in pairwise(ends)]
        seed = _core.crc32c(steps)
        return cls(like, chunk_rows, columns, rows, seed, table, ranges, data, matrix)

    @property
    def vector_sizes(self) -> tuple[int, int, int, int]:
        """Lengths of the lists in `steps`."""
        return self.rows, self.columns, self.rows, self.columns

    @property
    def chunk_items(self) -> int:
        return self.chunk_rows * self.columns

    def decode_all(self, out: Tensor, each: Each) -> None:
        """Decode every chunk into `out`."""
        items = as_bytes(out)
        size = self.chunk_items * self.like.dtype.itemsize

        def decode(i: int) -> None:
            self._decode(i, items[i * size : (i + 1) * size])

        each(decode, len(self.ranges))

    def decode_chunk(self, i: int) -> Tensor:
        """Return the items of one chunk."""
        rows = min(self.chunk_rows, self.rows - i * self.chunk_rows)
        out = allocate(Spec(self.like.dtype, (rows * self.columns,)))
        self._decode(i, as_bytes(out))
        return out

    def _decode(self, i: int, items: Tensor) -> None:
        chunk = self.data[self.ranges[i]]
        if _core.crc32c(chunk, self.seed) != int(self.table[i, 1]):
            raise CorruptFileError(f"checksum of chunk {i} does not match")
        try:
            self.matrix.decode(i * self.chunk_rows, chunk, dtype_name(self.like.dtype), items)
        except ValueError as error:
            raise CorruptFileError(str(error)) from error


def _unpack(packed: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Return the vectors of a part `steps`; raise ValueError if they are malformed."""
    vectors = []
    for size in sizes:
        values = torch.empty(size, dtype=torch.int16)
        used = _core.trellis_unpack(packed, as_bytes(values))
        packed = packed[used:]
        vectors.append(values)
    if packed.numel():
        raise ValueError(f"{packed.numel()} bytes follow the steps")
    return vectors
