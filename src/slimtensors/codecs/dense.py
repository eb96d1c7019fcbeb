"""Uncompressed tensors, for dtypes that safetensors does not support."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from slimtensors.codecs.protocol import register
from slimtensors.errors import CorruptFileError
from slimtensors.parallel import Each, serially
from slimtensors.tensor import Parts, Spec, allocate, as_bytes


@register
@dataclass(frozen=True)
class Dense:
    """Store the bytes unchanged. Lossless; for dtypes that safetensors does not support."""

    name: ClassVar[str] = "dense"
    part_names: ClassVar[tuple[str, ...]] = ("data",)

    def encode(self, x: Tensor, each: Each = serially) -> Parts:
        """Return `data`."""
        return {"data": as_bytes(x)}

    def decode(self, parts: Parts, like: Spec, each: Each = serially) -> Tensor:
        """Return a copy of the bytes, which may be a view of the file."""
        data = parts["data"]
        if data.nbytes != like.nbytes:
            raise CorruptFileError(f"expected {like.nbytes} bytes of data, got {data.nbytes}")
        out = allocate(like)
        as_bytes(out).copy_(as_bytes(data))
        return out
