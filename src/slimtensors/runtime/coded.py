"""Weights held entropy-coded: decoded when they are used, best ahead of it on another thread."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import gcd
from threading import Lock
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors import codecs
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Encoded, Plan, decode, decode_into, decode_parts, encode
from slimtensors.codecs.presets import Choice
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.runtime.compressed import CompressedTensor
from slimtensors.runtime.convert import Compression
from slimtensors.tensor import Json, Parts, Spec, allocate, ceil_div, scratch

_MOST_LEAVES = 16
_RUN = 1 << 17
"""Items that are decoded for one, at the least."""

_IN_CACHE = 2 << 20
"""Bytes that a thread decodes at a time, to be used while they are in a cache."""

_KEPT = 16 << 20
"""Bytes of decoded rows whose memory is kept for the next product."""

_AHEAD = 4 << 20
"""Bytes that are decoded at a time on another thread, which must be worth waking it."""


@dataclass(frozen=True)
class CodedConfig:
    """The tree of codecs, with a number for each plain tensor."""

    tree: Json

    def to_json(self) -> Json:
        """Return the JSON form."""
        return {"tree": self.tree}


class CodedTensor(CompressedTensor):
    """A tensor in the form that some plan gives it; lossless if the plan is."""

    kind = "coded"
    part_names = tuple(f"leaf{i}" for i in range(_MOST_LEAVES))
    config: CodedConfig
    _ahead: "Ahead | None" = None
    _was_decoded = False
    """Whether the checksums of all rows have been compared."""
    _pieces: "tuple[object, list[_Piece]] | None" = None
    """As it was last cut for a product, and how, once those checksums have been compared."""

    @classmethod
    def parse_config(cls, data: Json) -> CodedConfig:
        """Read the JSON form."""
        return CodedConfig(data["tree"])

    @classmethod
    def of(cls, x: Encoded) -> Self:
        """Hold what a plan made."""
        leaves = [leaf for _, leaf in x.leaves()]
        if not 0 < len(leaves) <= _MOST_LEAVES:
            raise ConfigError(f"a plan of {len(leaves)} parts cannot be held in memory: {x.plan}")
        numbers = iter(range(len(leaves)))
        parts = dict(zip(cls.part_names, leaves, strict=False))
        return cls(parts, CodedConfig(_tree(x, numbers)), x.spec)

    def encoded(self) -> Encoded:
        """Return what the plan made."""
        try:
            return _encoded(self.config.tree, self.parts())
        except (KeyError, TypeError, ValueError) as error:
            raise CorruptFileError(f"not a tree of codecs: {error!r}") from error

    def dense(self) -> Tensor:
        """Return an ordinary tensor with the same numbers."""
        return decode(self.encoded()).to(self.device, self.dtype)

    def forget(self) -> None:
        """Compare checksums again, and look anew where rows lie."""
        self._was_decoded, self._pieces = False, None

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by some rows after the other, which were decoded ahead or are now.

        Where torch has several threads, they decode together, and leave no core for another one.
        """
        if self.device.type == "meta":
            return super().linear(x, bias)
        out = x.new_empty((*x.shape[:-1], self.shape[0]))
        threads = torch.get_num_threads()
        ahead = self._ahead if threads == 1 else None
        for rows, dense in ahead.decoded(self) if ahead else _decoded(self, threads):
            out[..., rows] = functional.linear(x, dense, None if bias is None else bias[rows])
        self._was_decoded = True
        return out

    def rows(self, index: slice | Tensor) -> Tensor:
        """Return dense rows, decoding only the chunks of a few."""
        held = self.encoded()
        if isinstance(index, slice) or not isinstance(held.codec, codecs.RandomAccess):
            return self.dequantize()[index]
        found, places = torch.unique(index, return_inverse=True)
        if len(found) * _RUN > self.numel():
            return self.dequantize()[index]
        width, parts = self.shape[-1], decode_parts(held)
        runs = [(row * width, (row + 1) * width) for row in found.tolist()]
        some = [held.codec.decode_range(parts, held.spec, *run) for run in runs]
        return torch.stack(some)[places].to(self.device, self.dtype)

    def describe(self) -> str:
        """Say in a few words how the numbers are held."""
        return str(self.encoded().plan)


def coded_weight(preset: str | Plan = "lossless") -> Compression:
    """Hold weights as a preset would store them; those that it does not make smaller as they are.

    `quantize_(model, coded_weight())` needs `decode_ahead(blocks)` to be fast.
    """
    choose = presets.find(preset)

    def compress(weight: Tensor) -> CompressedTensor:
        x = weight.detach().cpu().contiguous()
        choice = choose("weight", x)
        plan = choice.plan if isinstance(choice, Choice) else choice
        return CodedTensor.of(encode(plan or Plan(codecs.Dense()), x))

    return compress


class Ahead:
    """Decodes each piece of some weights while the one before it is used: two are dense at most."""

    def __init__(self, weights: Iterable[CodedTensor]) -> None:
        """Expect the weights in this order; if others come, they are decoded when they do."""
        self._weights = list(weights)
        self._following = {id(one): other for one, other in pairwise(self._weights)}
        self._started: tuple[CodedTensor, Future[_Begun]] | None = None
        self._room: list[Tensor] = []
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, "slimtensors-ahead")
        for weight in self._weights:
            weight._ahead = self

    def remove(self) -> None:
        """Decode each weight only when it is used."""
        for weight in self._weights:
            weight._ahead = None
        self._pool.shutdown()

    def decoded(self, weight: CodedTensor) -> Iterator[tuple[slice, Tensor]]:
        """Give some dense rows after the other, not to be kept, and decode the next meanwhile."""
        with self._lock:
            started, self._started = self._started, None
        begun = started[1].result() if started and started[0] is weight else self._begin(weight)
        mine = begun.first
        for piece, next_piece in pairwise([*begun.pieces, None]):
            assert piece is not None
            soon = None if next_piece is None else self._pool.submit(self._decode, next_piece)
            if soon is None:
                self._start_following(weight)
            try:
                yield piece.rows, mine.dense
            finally:
                self._room.append(mine.room)
            if soon is not None:
                mine = soon.result()
        if id(weight) not in self._following:
            self._room.clear()

    def _start_following(self, weight: CodedTensor) -> None:
        following = self._following.get(id(weight))
        if following is not None:
            with self._lock:
                self._started = following, self._pool.submit(self._begin, following)

    def _begin(self, weight: CodedTensor) -> "_Begun":
        pieces = _cut(weight, _AHEAD)
        return _Begun(pieces, self._decode(pieces[0]))

    def _decode(self, piece: "_Piece") -> "_Decoded":
        room = self._find_room(piece.held.spec.nbytes)
        return _Decoded(room, piece.decode(room))

    def _find_room(self, nbytes: int) -> Tensor:
        """Take memory that another piece has left; what is too small is given back."""
        try:
            room = self._room.pop()
        except IndexError:
            room = torch.empty(0, dtype=torch.uint8)
        return room if room.nbytes >= nbytes else allocate(Spec(torch.uint8, (nbytes,)))


@dataclass(frozen=True)
class _Piece:
    """Some rows of a weight, and what they are when they are dense."""

    held: Encoded
    rows: slice
    device: torch.device
    dtype: torch.dtype
    again: codecs.Huffman | None
    """What decodes the rows without comparing checksums, if that was done before."""

    def decode(self, room: Tensor, threads: int = 1) -> Tensor:
        """Return the rows, in this memory if their codec can do that."""
        spec = self.held.spec
        out = room[: spec.nbytes].view(spec.dtype).view(spec.shape)
        if self.again is None:
            return decode_into(self.held, out).to(self.device, self.dtype)
        self.again.decode_unchecked(decode_parts(self.held), out, threads)
        return out.to(self.device, self.dtype)


@dataclass(frozen=True)
class _Decoded:
    room: Tensor
    dense: Tensor


@dataclass(frozen=True)
class _Begun:
    pieces: list[_Piece]
    first: _Decoded


def _decoded(weight: CodedTensor, threads: int) -> Iterator[tuple[slice, Tensor]]:
    """Give some dense rows after the other, all of them in the same memory."""
    pieces = _cut(weight, _IN_CACHE * threads)
    need = pieces[0].held.spec.nbytes
    room = scratch(need) if need <= _KEPT else allocate(Spec(torch.uint8, (need,)))
    return ((piece.rows, piece.decode(room, threads)) for piece in pieces)


def _cut(weight: CodedTensor, nbytes: int) -> list[_Piece]:
    """Return pieces of about so many bytes; one if products by pieces might not be exact."""
    how, kept, was_decoded = (nbytes, torch.get_num_threads()), weight._pieces, weight._was_decoded
    if kept is not None and kept[0] == how:
        return kept[1]
    pieces = _cut_anew(weight, nbytes, was_decoded=was_decoded)
    if was_decoded:
        weight._pieces = how, pieces
    return pieces


def _cut_anew(weight: CodedTensor, nbytes: int, *, was_decoded: bool) -> list[_Piece]:
    held = weight.encoded()
    codec, spec = held.codec, held.spec
    count, columns = spec.shape
    parts: Sequence[Mapping[str, Tensor | Encoded]] = [held.parts]
    every = max(count, 1)
    again = None
    if isinstance(codec, codecs.Huffman) and spec.numel and weight.device.type == "cpu":
        step = codec.step(spec)
        least = step // gcd(step, columns)  # rows that are whole chunks
        some = least * max(1, nbytes // (least * columns * spec.dtype.itemsize))
        threads = torch.get_num_threads()
        if some < count and _rows_stand_alone(weight.dtype, some, columns, threads):
            every = some
        parts = codec.split_parts(decode_parts(held), spec, ceil_div(every * columns, step) * step)
        again = codec if was_decoded else None
    pieces = []
    for first, held_rows in zip(range(0, max(count, 1), every), parts, strict=True):
        rows = slice(first, min(first + every, count))
        piece = Encoded(codec, Spec(spec.dtype, (rows.stop - first, columns)), held_rows)
        pieces.append(_Piece(piece, rows, weight.device, weight.dtype, again))
    return pieces


@cache
def _rows_stand_alone(dtype: torch.dtype, rows: int, columns: int, threads: int) -> bool:
    """Try whether products by so many rows of a weight have the bits of one by all its rows.

    torch adds up 16-bit numbers in the order of columns, however many rows there are; float32 not.
    What it does may depend on its threads: each number of them is tried.
    """
    if dtype.itemsize != 2:
        return False
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(2 * rows + rows // 3, columns, generator=random, dtype=dtype)
    for count in (1, 5, 32):
        x = torch.randn(count, columns, generator=random, dtype=dtype)
        some = [functional.linear(x, part) for part in torch.split(weight, rows)]
        if not torch.equal(torch.cat(some, 1), functional.linear(x, weight)):
            return False
    return True


def decode_ahead(blocks: Iterable[nn.Module]) -> Ahead:
    """While a weight is used on one thread, decode the next one on another.

    `blocks` are modules in the order in which they run. Call it when the weights are in place: new
    ones, as `model.to(…)` makes, are not known to it. `remove()` of what it returns ends it.
    """
    weights = {w: None for block in blocks for w in block.parameters()}
    return Ahead(w for w in weights if isinstance(w, CodedTensor))


def _tree(x: Encoded, numbers: Iterable[int]) -> Json:
    parts = {
        name: _tree(part, numbers) if isinstance(part, Encoded) else next(iter(numbers))
        for name, part in x.parts.items()
    }
    return {**x.spec.to_json(), "codec": codecs.to_json(x.codec), "parts": parts}


def _encoded(tree: Json, leaves: Parts) -> Encoded:
    parts = {
        name: _encoded(part, leaves) if isinstance(part, dict) else leaves[f"leaf{part}"]
        for name, part in tree["parts"].items()
    }
    return Encoded(codecs.from_json(tree["codec"]), Spec.from_json(tree), parts)
