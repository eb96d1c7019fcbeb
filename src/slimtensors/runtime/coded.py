"""Weights that stay entropy-coded in memory and are decoded on use.

`decode_ahead` decodes the next weight on another thread while the current one is used.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from itertools import accumulate, pairwise
from math import gcd
from threading import Lock
from typing import Any, ClassVar, Self, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors import codecs
from slimtensors._moved import Renamed
from slimtensors.codecs import presets
from slimtensors.codecs.plan import (
    MAX_DEPTH,
    Encoded,
    Plan,
    check_expansion,
    decode,
    decode_into,
    decode_parts,
    encode,
)
from slimtensors.codecs.presets import Choice
from slimtensors.codecs.protocol import check_part_names
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.parallel import Workers, split_chunks
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.configs import Compression
from slimtensors.tensor import (
    KERNEL_FLOATS,
    QUANTIZED_DTYPES,
    Json,
    Parts,
    Spec,
    allocate,
    ceil_div,
    scratch,
)

_MAX_LEAVES = 16

_MIN_RANGE_ITEMS = 1 << 17
"""Items that are decoded at least to read a single row."""

_PIECE_BYTES = 2 << 20
"""Bytes that a thread decodes at a time; they are used while they are in a cache."""

_MAX_SCRATCH_BYTES = 16 << 20
"""Limit of decoded bytes whose memory is reused by the next product."""

_PREFETCH_BYTES = 4 << 20
"""Bytes that are decoded at a time on another thread; less is not worth waking it."""


def coded_weight(preset: str | Plan = "lossless") -> Compression:
    """Keep weights entropy-coded in memory, as a preset stores them.

        quantize_(model, coded_weight())
        decode_ahead(model.model.layers)

    Weights that the preset cannot make smaller stay dense. Without `decode_ahead` every weight is
    decoded when it is used, which is slow.
    """
    choose = presets.find(preset)

    def compress(weight: Tensor) -> CompressedTensor:
        x = weight.detach().cpu().contiguous()
        choice = choose("weight", x)
        plan = choice.plan if isinstance(choice, Choice) else choice
        return CodedTensor.from_encoded(encode(plan or Plan(codecs.Dense()), x))

    return compress


def decode_ahead(blocks: Iterable[nn.Module]) -> "Prefetcher":
    """Decode the next weight on another thread while one is used.

    `blocks` are modules in the order in which they run. Call it after the weights are in place: it
    does not apply to new ones, such as those of `model.to(…)`. Call `remove()` on the result to
    stop.
    """
    weights = {w: None for block in blocks for w in _list_weights(block)}
    return Prefetcher(w for w in weights if isinstance(w, CodedTensor))


def _list_weights(block: nn.Module) -> list[Tensor]:
    """Return the weights of a block, except the rows of embeddings, which are looked up."""
    return [
        weight
        for module in block.modules()
        if not isinstance(module, nn.Embedding)
        for weight in module.parameters(recurse=False)
    ]


@dataclass(frozen=True)
class CodedConfig:
    """Tree of codecs, with an index for each plain tensor."""

    tree: Json

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"tree": self.tree}


class CodedTensor(CompressedTensor):
    """A tensor encoded by a plan; lossless if the plan is."""

    kind = "coded"
    part_names = tuple(f"leaf{i}" for i in range(_MAX_LEAVES))
    optional_parts = frozenset(part_names[1:])
    config: CodedConfig
    _prefetcher: "Prefetcher | None" = None
    _cache: "_Cache"

    def __new__(cls, parts: Parts, config: CodedConfig, spec: Spec) -> Self:
        """Wrap `parts` without copying them."""
        coded = super().__new__(cls, parts, config, spec)
        coded._cache = _Cache()
        return coded

    def alias(self) -> Self:
        """Return a tensor with the same parts, and the same knowledge about them."""
        other = super().alias()
        other._cache = self._cache
        return other

    @classmethod
    def parse_config(cls, data: Json) -> CodedConfig:
        """Parse the JSON form."""
        return CodedConfig(data["tree"])

    of = Renamed("from_encoded")

    @classmethod
    def from_encoded(cls, x: Encoded) -> Self:
        """Wrap the result of a plan."""
        leaves = [leaf for _, leaf in x.leaves()]
        if not 0 < len(leaves) <= _MAX_LEAVES:
            raise ConfigError(
                f"plan {x.plan} has {len(leaves)} parts, expected 1 to {_MAX_LEAVES} for a tensor"
                " in memory"
            )
        parts = dict(zip(cls.part_names, leaves, strict=False))
        return cls(parts, CodedConfig(_describe_tree(x, iter(range(len(leaves))))), x.spec)

    def encoded(self) -> Encoded:
        """Return the result of the plan."""
        try:
            return _parse_tree(self.config.tree, self.parts())
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"invalid tree of codecs: {error!r}") from error

    def check(self) -> None:
        """Raise `CorruptFileError` if the tree of codecs does not fit the shape or the leaves."""
        super().check()
        encoded = self.encoded()
        indices = list(_list_indices(self.config.tree))
        if sorted(indices) != list(range(len(self.parts()))):
            raise CorruptFileError(f"expected each leaf once in the tree of codecs, got {indices}")
        is_cast = {encoded.spec.dtype, self.dtype} <= {*KERNEL_FLOATS, torch.float64}
        if encoded.spec.shape != tuple(self.shape) or not (
            is_cast or encoded.spec.dtype is self.dtype
        ):
            raise CorruptFileError(f"codes of {encoded.spec} do not fit {Spec.of(self)}")
        check_expansion(encoded, sum(leaf.nbytes for leaf in self.parts().values()))

    def decompress(self) -> Tensor:
        """Return the dense tensor."""
        return decode(self.encoded()).to(self.device, self.dtype)

    def invalidate(self) -> None:
        """Compare checksums and find the pieces again."""
        self._cache.is_verified, self._cache.pieces, self._cache.stream = False, None, None

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by the rows piece by piece; pieces are prefetched, or decoded on demand.

        With several torch threads no core is left for prefetching: all of them decode instead.
        """
        out = x.new_empty((*x.shape[:-1], self.shape[0]))
        threads = torch.get_num_threads()
        prefetcher = self._prefetcher if threads == 1 else None
        pieces = prefetcher.decode(self) if prefetcher else _decode_pieces(self, threads)
        for rows, dense in pieces:
            out[..., rows] = functional.linear(x, dense, None if bias is None else bias[rows])
        self._cache.is_verified = True
        return out

    def take_rows(self, index: slice | Tensor) -> Tensor:
        """Return dense rows; for a few rows, only their chunks are decoded."""
        encoded = self.encoded()
        if isinstance(index, slice) or not isinstance(encoded.codec, codecs.RandomAccess):
            return self.dequantize()[index]
        unique, inverse = torch.unique(index, return_inverse=True)
        if _has_row_chunks(encoded.codec, self):
            if len(unique) and int(unique[-1]) >= len(self):
                raise IndexError(f"index {int(unique[-1])} is out of range for {len(self)} rows")
            if self._cache.stream is None:  # parsing all steps takes longer than decoding a chunk
                self._cache.stream = encoded.codec.parse(decode_parts(encoded), encoded.spec)
            return _take_chunk_rows(self._cache.stream, unique)[inverse].to(self.dtype)
        if len(unique) * _MIN_RANGE_ITEMS > self.numel():
            return self.dequantize()[index]
        width, parts = self.shape[-1], decode_parts(encoded)
        ranges = [(row * width, (row + 1) * width) for row in unique.tolist()]
        rows = [encoded.codec.decode_range(parts, encoded.spec, *run) for run in ranges]
        return torch.stack(rows)[inverse].to(self.device, self.dtype)

    def describe(self) -> str:
        """Return a short description of the encoding."""
        return str(self.encoded().plan)


@dataclass
class _Cache:
    """Knowledge about parts, shared by all tensors that have them."""

    is_verified: bool = False
    """Whether the checksums of all rows have been compared."""
    pieces: "tuple[object, list[_Piece]] | None" = None
    """Settings and result of the last `_split`, once checksums have been compared."""
    stream: Any = None
    """The parsed chunks of a matrix whose rows are looked up."""


class Prefetcher:
    """Decodes each piece of some weights while the previous one is used.

    At most two pieces are dense at a time.
    """

    def __init__(self, weights: Iterable[CodedTensor]) -> None:
        """Expect `weights` in this order at first, then in the order in which they were used."""
        self._weights = list(weights)
        self._next = {id(one): other for one, other in pairwise(self._weights)}
        self._started: tuple[CodedTensor, Future[_Prefetched]] | None = None
        self._last: CodedTensor | None = None
        self._free_buffers: list[Tensor] = []
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, "slimtensors-prefetch")
        for weight in self._weights:
            weight._prefetcher = self

    def remove(self) -> None:
        """Stop prefetching: each weight is decoded when it is used."""
        for weight in self._weights:
            weight._prefetcher = None
        self._pool.shutdown()

    def decode(self, weight: CodedTensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield dense rows piece by piece, decoding the next piece meanwhile.

        A piece is valid only until the next one is requested.
        """
        with self._lock:
            started, self._started = self._started, None
            last, self._last = self._last, weight
        if started is not None and started[0] is weight:
            prefetched = started[1].result()
        else:
            if started is not None and last is not None:
                self._next[id(last)] = weight  # the order is another one
            prefetched = self._start(weight)
        current = prefetched.first
        for piece, next_piece in pairwise([*prefetched.pieces, None]):
            assert piece is not None
            future = None if next_piece is None else self._pool.submit(self._decode, next_piece)
            if future is None:
                self._start_next(weight)
            try:
                yield piece.rows, current.dense
            finally:
                self._free_buffers.append(current.buffer)
            if future is not None:
                current = future.result()
        if id(weight) not in self._next:
            self._free_buffers.clear()

    def _start_next(self, weight: CodedTensor) -> None:
        following = self._next.get(id(weight))
        if following is not None:
            with self._lock:
                self._started = following, self._pool.submit(self._start, following)

    def _start(self, weight: CodedTensor) -> "_Prefetched":
        pieces = _list_chunks(weight) or _split(weight, _PREFETCH_BYTES)
        return _Prefetched(pieces, self._decode(pieces[0]))

    def _decode(self, piece: "_Piece | _Chunk") -> "_DecodedPiece":
        buffer = self._find_buffer(piece.nbytes)
        return _DecodedPiece(buffer, piece.decode(buffer))

    def _find_buffer(self, nbytes: int) -> Tensor:
        """Return a free buffer, or a new one if it is too small."""
        try:
            buffer = self._free_buffers.pop()
        except IndexError:
            buffer = torch.empty(0, dtype=torch.uint8)
        return buffer if buffer.nbytes >= nbytes else allocate(Spec(torch.uint8, (nbytes,)))


@dataclass(frozen=True)
class _Piece:
    """Some rows of a weight, encoded."""

    encoded: Encoded
    rows: slice
    device: torch.device
    dtype: torch.dtype
    unchecked: codecs.Huffman | None
    """Codec that decodes the rows without comparing checksums, if they were compared before."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer to decode into."""
        return self.encoded.spec.nbytes

    def decode(self, buffer: Tensor, threads: int = 1) -> Tensor:
        """Return the rows, decoded into `buffer` if the codec supports that."""
        spec = self.encoded.spec
        out = buffer[: spec.nbytes].view(spec.dtype).view(spec.shape)
        if self.unchecked is None:
            return decode_into(self.encoded, out).to(self.device, self.dtype)
        self.unchecked.decode_unchecked(decode_parts(self.encoded), out, threads)
        return out.to(self.device, self.dtype)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a weight: a chunk that its codec can decode alone."""

    stream: Any
    index: int
    rows: slice
    dtype: torch.dtype
    nbytes: ClassVar[int] = 0
    """Bytes of the buffer to decode into: the codec allocates the rows itself."""

    @property
    def dense_bytes(self) -> int:
        """Bytes of the decoded rows."""
        height = self.rows.stop - self.rows.start
        return int(height * self.stream.columns * self.dtype.itemsize)

    def decode(self, buffer: Tensor | None = None) -> Tensor:
        """Return the rows."""
        dense: Tensor = self.stream.decode_chunk(self.index)
        return dense.view(-1, self.stream.columns).to(self.dtype)


def _list_chunks(weight: CodedTensor) -> list[_Chunk]:
    """Return the chunks of a weight; none if its rows cannot be decoded one chunk at a time."""
    if weight._cache.pieces is not None:
        return []  # it was split before
    encoded = weight.encoded()
    if not _has_row_chunks(encoded.codec, weight):
        return []
    stream: Any = weight._cache.stream
    if stream is None:
        stream = encoded.codec.parse(decode_parts(encoded), encoded.spec)
    height = stream.chunk_rows
    starts = range(0, stream.rows, height)
    return [
        _Chunk(stream, i, slice(first, min(first + height, stream.rows)), weight.dtype)
        for i, first in enumerate(starts)
    ]


def _has_row_chunks(codec: codecs.Codec, weight: CodedTensor) -> TypeGuard[codecs.Trellis]:
    """Return True if rows can be decoded one chunk at a time."""
    return (
        isinstance(codec, codecs.Trellis)
        and not codec.transposed
        and codec.row_dims == 1
        and weight.dim() == 2
        and weight.device.type == "cpu"
    )


def _take_chunk_rows(stream: Any, rows: Tensor) -> Tensor:
    """Return dense rows, given their sorted numbers; each of their chunks is decoded once."""
    if not len(rows):
        return torch.empty(0, stream.columns, dtype=stream.like.dtype)
    chunks, counts = torch.unique_consecutive(rows // stream.chunk_rows, return_counts=True)
    ranges = [slice(*ends) for ends in pairwise(accumulate(counts.tolist(), initial=0))]

    def take(i: int) -> Tensor:
        dense: Tensor = stream.decode_chunk(int(chunks[i])).view(-1, stream.columns)
        return dense[rows[ranges[i]] % stream.chunk_rows]

    return torch.cat(_find_workers(torch.get_num_threads(), os.getpid()).each(take, len(chunks)))


@lru_cache(maxsize=1)
def _find_workers(threads: int, process: int) -> Workers:
    """Return threads for this process; they do not survive a fork."""
    return Workers(threads)


@dataclass(frozen=True)
class _DecodedPiece:
    buffer: Tensor
    dense: Tensor


@dataclass(frozen=True)
class _Prefetched:
    """Pieces of a weight, of which the first is decoded."""

    pieces: "Sequence[_Piece | _Chunk]"
    first: _DecodedPiece


def _decode_pieces(weight: CodedTensor, threads: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield dense rows piece by piece, all in the same memory."""
    if chunks := _list_chunks(weight):
        yield from _decode_chunks(chunks, threads)
        return
    pieces = _split(weight, _PIECE_BYTES * threads)
    nbytes = pieces[0].nbytes
    reuse = nbytes <= _MAX_SCRATCH_BYTES
    buffer = scratch(nbytes) if reuse else allocate(Spec(torch.uint8, (nbytes,)))
    yield from ((piece.rows, piece.decode(buffer, threads)) for piece in pieces)


def _decode_chunks(chunks: "Sequence[_Chunk]", threads: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows of each chunk; several are decoded at a time, on all threads."""
    workers = _find_workers(threads, os.getpid())
    for part in split_chunks(len(chunks), threads * max(1, _PIECE_BYTES // chunks[0].dense_bytes)):
        some = chunks[part]
        dense = workers.each(partial(_decode_one, some), len(some))
        yield from zip((chunk.rows for chunk in some), dense, strict=True)


def _decode_one(chunks: Sequence[_Chunk], i: int) -> Tensor:
    return chunks[i].decode()


def _split(weight: CodedTensor, nbytes: int) -> list[_Piece]:
    """Return pieces of about `nbytes`; a single one if products by pieces might not be exact."""
    settings = nbytes, torch.get_num_threads()
    cached, is_verified = weight._cache.pieces, weight._cache.is_verified
    if cached is not None and cached[0] == settings:
        return cached[1]
    pieces = _find_pieces(weight, nbytes, is_verified=is_verified)
    if is_verified:
        weight._cache.pieces = settings, pieces
    return pieces


def _find_pieces(weight: CodedTensor, nbytes: int, *, is_verified: bool) -> list[_Piece]:
    encoded = weight.encoded()
    codec, spec = encoded.codec, encoded.spec
    count, columns = spec.shape
    parts: Sequence[Mapping[str, Tensor | Encoded]] = [encoded.parts]
    height = max(count, 1)
    unchecked = None
    if isinstance(codec, codecs.Huffman) and spec.numel and weight.device.type == "cpu":
        step = codec.step(spec)
        least = step // gcd(step, columns)  # rows that are whole chunks
        rows_per_piece = least * max(1, nbytes // (least * columns * spec.dtype.itemsize))
        threads = torch.get_num_threads()
        if rows_per_piece < count and _are_partial_products_exact(
            weight.dtype, rows_per_piece, columns, threads
        ):
            height = rows_per_piece
        parts = codec.split_parts(
            decode_parts(encoded), spec, ceil_div(height * columns, step) * step
        )
        unchecked = codec if is_verified else None
    pieces = []
    for first, part in zip(range(0, max(count, 1), height), parts, strict=True):
        rows = slice(first, min(first + height, count))
        piece = Encoded(codec, Spec(spec.dtype, (rows.stop - first, columns)), part)
        pieces.append(_Piece(piece, rows, weight.device, weight.dtype, unchecked))
    return pieces


@cache
def _are_partial_products_exact(dtype: torch.dtype, rows: int, columns: int, threads: int) -> bool:
    """Return True if products by this many rows of a weight equal those by all rows bitwise.

    torch adds 16-bit products in the order of columns for any number of rows, but not float32. The
    order may depend on the number of threads, so each number is tested.
    """
    if dtype.itemsize != 2:
        return False
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * rows + rows // 3, columns, generator=random, dtype=dtype)
    for count in (1, 5, 32):
        x = torch.randn(count, columns, generator=random, dtype=dtype)
        products = [functional.linear(x, part) for part in torch.split(weight, rows)]
        if not torch.equal(torch.cat(products, 1), functional.linear(x, weight)):
            return False
    return True


def _describe_tree(x: Encoded, indices: Iterator[int]) -> Json:
    """Return the JSON form of the codecs, with an index for each plain part."""
    parts = {
        name: _describe_tree(part, indices) if isinstance(part, Encoded) else next(indices)
        for name, part in x.parts.items()
    }
    return {**x.spec.to_json(), "codec": codecs.to_json(x.codec), "parts": parts}


def _parse_tree(tree: Json, leaves: Parts, depth: int = 0) -> Encoded:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} levels deep")
    codec, spec = codecs.from_json(tree["codec"]), Spec.from_json(tree)
    check_part_names(codec, tree["parts"])
    parts = {
        name: _parse_tree(part, leaves, depth + 1)
        if isinstance(part, dict)
        else leaves[f"leaf{part}"]
        for name, part in tree["parts"].items()
    }
    if spec.dtype in QUANTIZED_DTYPES:
        raise ValueError(f"{spec.dtype} is not supported")
    return Encoded(codec, spec, parts)


def _list_indices(tree: Json) -> Iterator[int]:
    for part in tree["parts"].values():
        if isinstance(part, dict):
            yield from _list_indices(part)
        else:
            yield part
