"""Floats rounded to bytes, with a scale for every few of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from slimtensors.codecs.registry import register
from slimtensors.errors import ConfigError, CorruptFileError
from slimtensors.memory import empty
from slimtensors.spec import Each, Parts, Spec, serially

_LARGEST = 127
_PIECE = 1 << 16
"""Items that are rounded at once, few enough to stay in a cache."""
_GROUP = 16
"""Pieces per piece of work: enough to be worth a thread."""


@register
@dataclass(frozen=True)
class IntBlocks:
    """Round floats to 8-bit integers, with a scale for each block of items. Lossy; zeros stay."""

    name: ClassVar[str] = "int-blocks"
    lossy: ClassVar[bool] = True

    block: int = 64

    def __post_init__(self) -> None:
        if type(self.block) is not int or not 1 <= self.block <= _PIECE or _PIECE % self.block:
            raise ConfigError(f"block must be a power of two up to {_PIECE}, got {self.block!r}")

    def encode(self, x: Tensor) -> Parts:
        """Return `q` (int8) and `scale` (float32)."""
        return self.encode_each(x, serially)

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Multiply back."""
        return self.decode_each(parts, like, serially)

    def encode_each(self, x: Tensor, each: Each) -> Parts:
        """Round pieces of the tensor side by side."""
        if not x.is_floating_point():
            raise ConfigError(f"only floats can be rounded, not {x.dtype}")
        flat = x.reshape(-1)
        q = empty(Spec(torch.int8, (flat.numel(),)))
        scale = torch.empty(self._blocks(flat.numel()))

        def one(i: int) -> None:
            part, here = flat[_piece(i)].float(), q[_piece(i)]
            rows = pad(part, (0, -len(part) % self.block)).view(-1, self.block)
            largest = rows.abs().amax(dim=1).div_(_LARGEST)
            if not torch.isfinite(largest).all():
                raise ConfigError("holds NaN or infinity, which integers cannot say")
            # The least normal number: below it, a quotient would overflow; such blocks become 0.
            largest.clamp_(min=torch.finfo(torch.float32).tiny)
            scale[self._blocks(_piece(i).start) :][: len(rows)] = largest
            here[:] = rows.div(largest.unsqueeze(1)).round_().view(-1)[: len(part)]

        _by_groups(one, flat.numel(), each)
        return {"q": q.view(x.shape), "scale": scale}

    def decode_each(self, parts: Parts, like: Spec, each: Each) -> Tensor:
        """Multiply pieces of the tensor side by side."""
        q, scale = parts["q"], parts["scale"]
        if Spec.of(q) != Spec(torch.int8, like.shape) or not like.dtype.is_floating_point:
            raise CorruptFileError(f"integers of {Spec.of(q)} do not fit a tensor of {like}")
        if Spec.of(scale) != Spec(torch.float32, (self._blocks(like.numel),)):
            raise CorruptFileError(f"scales of {Spec.of(scale)} do not fit a tensor of {like}")
        out = empty(like)
        flat, items = q.reshape(-1), out.view(-1)

        def one(i: int) -> None:
            part = flat[_piece(i)].float()
            rows = pad(part, (0, -len(part) % self.block)).view(-1, self.block)
            rows.mul_(scale[self._blocks(_piece(i).start) :][: len(rows)].unsqueeze(1))
            items[_piece(i)] = rows.view(-1)[: len(part)]

        _by_groups(one, like.numel, each)
        return out

    def _blocks(self, items: int) -> int:
        return -(-items // self.block)


def _by_groups(work: Callable[[int], None], items: int, each: Each) -> None:
    pieces = -(-items // _PIECE)

    def some(group: int) -> None:
        for i in range(group * _GROUP, min((group + 1) * _GROUP, pieces)):
            work(i)

    each(some, -(-pieces // _GROUP))


def _piece(i: int) -> slice:
    return slice(i * _PIECE, (i + 1) * _PIECE)
