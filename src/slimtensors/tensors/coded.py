"""Weights held entropy-coded: decoded when they are used, best ahead of it on another thread."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from threading import Lock
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from slimtensors import codecs, presets
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.memory import empty
from slimtensors.plan import Encoded, Plan, decode, decode_into, encode, plain_parts
from slimtensors.presets import Choice
from slimtensors.spec import Json, Parts, Spec
from slimtensors.tensors.compressed import CompressedTensor
from slimtensors.tensors.convert import Compression

_MOST_LEAVES = 16
_RUN = 1 << 17
"""Items that are decoded for one, at the least."""


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

    def linear(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply by what was decoded ahead, or is now."""
        if self._ahead is None:
            return functional.linear(x, self.dequantize(), bias)
        with self._ahead.decoded(self) as dense:
            return functional.linear(x, dense, bias)

    def rows(self, index: slice | Tensor) -> Tensor:
        """Return dense rows, decoding only the chunks of a few."""
        held = self.encoded()
        if isinstance(index, slice) or not isinstance(held.codec, codecs.Ranged):
            return self.dequantize()[index]
        found, places = torch.unique(index, return_inverse=True)
        if len(found) * _RUN > self.numel():
            return self.dequantize()[index]
        width, parts = self.shape[-1], plain_parts(held)
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
    """Decodes each of some weights while the one before it is used; at most two are dense."""

    def __init__(self, weights: Iterable[CodedTensor]) -> None:
        """Expect the weights in this order; if others come, they are decoded when they do."""
        self._weights = list(weights)
        self._following = {id(one): other for one, other in pairwise(self._weights)}
        self._started: tuple[CodedTensor, Future[_Decoded]] | None = None
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

    @contextmanager
    def decoded(self, weight: CodedTensor) -> Iterator[Tensor]:
        """Give the dense weight, which must not be kept, and start to decode the next one."""
        with self._lock:
            started, self._started = self._started, None
        mine = started[1].result() if started and started[0] is weight else self._decode(weight)
        following = self._following.get(id(weight))
        if following is not None:
            with self._lock:
                self._started = following, self._pool.submit(self._decode, following)
        try:
            yield mine.dense
        finally:
            self._room.append(mine.room)
            if following is None:
                self._room.clear()

    def _decode(self, weight: CodedTensor) -> "_Decoded":
        held = weight.encoded()
        room = self._find_room(held.spec.nbytes)
        out = room[: held.spec.nbytes].view(held.spec.dtype).view(held.spec.shape)
        return _Decoded(room, decode_into(held, out).to(weight.device, weight.dtype))

    def _find_room(self, nbytes: int) -> Tensor:
        """Take memory that another weight has left; what is too small is given back."""
        try:
            room = self._room.pop()
        except IndexError:
            room = torch.empty(0, dtype=torch.uint8)
        return room if room.nbytes >= nbytes else empty(Spec(torch.uint8, (nbytes,)))


@dataclass(frozen=True)
class _Decoded:
    room: Tensor
    dense: Tensor


def decode_ahead(blocks: Iterable[nn.Module]) -> Ahead:
    """While a weight is used, decode the next one on another thread.

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
