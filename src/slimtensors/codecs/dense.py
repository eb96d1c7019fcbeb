"""Tensors as they are, for what safetensors itself cannot say."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.tensor import Parts, Spec, allocate, as_bytes


@register
@dataclass(frozen=True)
class Dense:
    """Store the bytes as they are. Lossless; for dtypes that safetensors has no name for."""

    name: ClassVar[str] = "dense"

    def encode(self, x: Tensor) -> Parts:
        """Return `data`."""
        return {"data": as_bytes(x)}

    def decode(self, parts: Parts, like: Spec) -> Tensor:
        """Copy the bytes, so that the result does not depend on the file."""
        data = parts["data"]
        if data.nbytes != like.nbytes:
            raise CorruptFileError(f"{data.nbytes} bytes of data where {like.nbytes} are needed")
        out = allocate(like)
        as_bytes(out).copy_(as_bytes(data))
        return out
