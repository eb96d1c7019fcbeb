"""A codec of another package, for the protocol before `each` was added."""

from dataclasses import dataclass
from typing import ClassVar

import torch


@dataclass(frozen=True)
class Flip:
    """Store the bytes xored with a key. Lossless."""

    name: ClassVar[str] = "acme.flip"
    key: int = 0x55

    def encode(self, x):
        raw = x.contiguous().view(-1).view(torch.uint8)
        return {"flipped": raw ^ self.key}

    def decode(self, parts, like):
        return (parts["flipped"] ^ self.key).view(like.dtype).view(like.shape)
