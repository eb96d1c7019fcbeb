"""A stream transform for those who keep torch's own files: byte planes in a prefix code.

`FileSystemWriter(_extensions=[SlimStream()])` writes with it, and
`FileSystemReader(_extension_registry=stream_registry())` reads.
"""

import io
import struct
from typing import IO, TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint._extension import ExtensionRegistry, StreamTransformExtension

from slimtensors import _core
from slimtensors.codecs import Huffman
from slimtensors.errors import ConfigError, CorruptFileError, UnsupportedVersionError
from slimtensors.spec import Parts, Spec, as_bytes

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

_NAME, _VERSION = "stream.slimtensors", "1"
_FRAME = 1 << 20
"""Bytes that are coded together: a multiple of what torch.save aligns tensors to."""
_SAMPLE = 1 << 14
"""Bytes by which the size of items is found."""
_FEW = 4096
"""Bytes that are not worth a code."""
_HEAD = struct.Struct("<4sBIII")
"""Magic, item size (0: plain, 255: the end), bytes of content, bytes that follow, CRC-32C."""
_MAGIC = b"SLMF"
_PLAIN, _END = 0, 255
_DTYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
"""How the core sees items of so many bytes: floats with the exponents on top."""


class SlimStream(StreamTransformExtension):
    """Code what torch writes in frames, each with a checksum. Lossless."""

    @staticmethod
    def registry_name() -> str:
        """Return the name in a checkpoint's metadata."""
        return _NAME

    @staticmethod
    def from_descriptor(version: str) -> "SlimStream":
        """Return what reads streams of this version."""
        if version != _VERSION:
            raise UnsupportedVersionError(
                f"a stream of version {version!r}, this library reads {_VERSION}; update it"
            )
        return SlimStream()

    def get_descriptor(self) -> str:
        """Return name and version."""
        return f"{_NAME}/{_VERSION}"

    def transform_to(self, output: IO[bytes]) -> IO[bytes]:
        """Return a stream that codes what is written to it."""
        return cast(IO[bytes], _Coder(output))

    def transform_from(self, input: IO[bytes]) -> IO[bytes]:
        """Return a stream that decodes what it reads."""
        return cast(IO[bytes], _Decoder(input))


def stream_registry() -> ExtensionRegistry:
    """Return the extensions that torch knows, and ours."""
    registry = ExtensionRegistry()
    registry.register(SlimStream)
    return registry


class _Coder(io.RawIOBase):
    def __init__(self, output: IO[bytes]) -> None:
        self._output, self._held, self._total = output, bytearray(), 0
        self._size = _PLAIN
        """By which the last frame was coded; most streams are one tensor."""

    def writable(self) -> bool:
        return True

    def write(self, data: "ReadableBuffer", /) -> int:
        given = memoryview(data).cast("B")
        at = 0
        while len(self._held) + len(given) - at >= _FRAME:
            size = _FRAME - len(self._held)
            if self._held:
                self._held += given[at : at + size]
                self._put(bytes(self._held))
                self._held.clear()
            else:
                self._put(given[at : at + size])
            at += size
        self._held += given[at:]
        return len(given)

    def close(self) -> None:
        """Write what is left and the end, and close what the frames went to."""
        if self.closed:
            return
        try:
            if self._held:
                self._put(bytes(self._held))
            self._frame(_END, 0, struct.pack("<Q", self._total))
        finally:
            super().close()
            self._output.close()
        if not self._total:
            raise ConfigError("nothing came: with SerializationFormat.SAFETENSORS torch passes by")

    def _put(self, raw: bytes | memoryview) -> None:
        self._total += len(raw)
        size = self._size or _best_size(raw)
        coded = _code(raw, size)
        if len(coded) >= len(raw):
            size, coded = _PLAIN, bytes(raw)
        self._size = size
        self._frame(size, len(raw), coded)

    def _frame(self, size: int, count: int, content: bytes) -> None:
        seal = _seal(size, count, content)
        self._output.write(_HEAD.pack(_MAGIC, size, count, len(content), seal))
        self._output.write(content)


class _Decoder(io.RawIOBase):
    def __init__(self, input: IO[bytes]) -> None:
        self._input, self._frame, self._total, self._ended = input, memoryview(b""), 0, False

    def readable(self) -> bool:
        return True

    def readinto(self, target: "WriteableBuffer", /) -> int:
        if not self._frame and not self._ended:
            self._frame = memoryview(self._next())
        out = memoryview(target).cast("B")
        size = min(len(out), len(self._frame))
        out[:size] = self._frame[:size]
        self._frame = self._frame[size:]
        return size

    def readall(self) -> bytes:
        frames = [bytes(self._frame)]
        self._frame = memoryview(b"")
        while not self._ended:
            frames.append(self._next())
        return b"".join(frames)

    def close(self) -> None:
        if not self.closed:
            super().close()
            self._input.close()

    def _next(self) -> bytes:
        """Return the content of the next frame; nothing at the end."""
        magic, size, count, stored, seal = _HEAD.unpack(self._exactly(_HEAD.size))
        if magic != _MAGIC or count > _FRAME or stored > 2 * _FRAME:
            raise CorruptFileError("a stream of slimtensors is damaged: no frame where one must be")
        content = self._exactly(stored)
        if _seal(size, count, content) != seal:
            raise CorruptFileError("a stream of slimtensors is damaged: a checksum differs")
        if size == _END:
            self._ended = True
            if content != struct.pack("<Q", self._total):
                raise CorruptFileError("a stream of slimtensors is damaged: frames are missing")
            return b""
        self._total += count
        return _decoded(size, count, content)

    def _exactly(self, size: int) -> bytes:
        parts: list[bytes] = []
        while size and (part := self._input.read(size)):
            parts.append(part)
            size -= len(part)
        if size:
            raise CorruptFileError("a stream of slimtensors is truncated")
        return b"".join(parts)


def _seal(size: int, count: int, content: bytes) -> int:
    return _core.crc32c(content, _core.crc32c(_HEAD.pack(_MAGIC, size, count, len(content), 0)))


def _best_size(raw: bytes | memoryview) -> int:
    """Return the item size by which the bytes probably get smallest; none if there are few."""
    middle = len(raw) // 2 // _SAMPLE * _SAMPLE
    sample = np.frombuffer(raw[middle : middle + _SAMPLE], np.uint8)
    if len(sample) < _FEW:
        return _PLAIN
    return min(_DTYPES, key=lambda size: _bits(sample, size))


def _bits(sample: NDArray[np.uint8], size: int) -> float:
    """Estimate the bits of items of so many bytes: their entropy, and the codes for it."""
    columns = sample[: len(sample) // size * size].reshape(-1, size)
    total = 0.0
    for i in range(size):
        counts = np.bincount(columns[:, i], minlength=256)
        seen = counts[counts > 0]
        total += 8 * len(seen) - float((seen * np.log2(seen / len(columns))).sum())
    return total


def _code(raw: bytes | memoryview, size: int) -> bytes:
    """Return the table of chunks, their data, and the bytes that make no whole item."""
    if size == _PLAIN:
        return bytes(raw)
    whole = len(raw) // size * size
    parts = Huffman().encode(_view(raw[:whole], size))
    return b"".join([_raw(parts["chunks"]), _raw(parts["data"]), bytes(raw[whole:])])


def _decoded(size: int, count: int, content: bytes) -> bytes:
    if size == _PLAIN:
        if len(content) != count:
            raise CorruptFileError(f"a frame of {count} bytes holds {len(content)}")
        return content
    if size not in _DTYPES:
        raise CorruptFileError(f"a frame of items of {size} bytes")
    like = Spec(_DTYPES[size], (count // size,))
    rest = count % size
    table = 4 * (1 + size) * -(-like.nbytes // (_core.HUFFMAN_CHUNK * size))
    if len(content) < table + rest:
        raise CorruptFileError(f"a frame of {len(content)} bytes is too short")
    end = len(content) - rest
    parts: Parts = {
        "chunks": _view(content[:table], 4).view(torch.uint32).view(-1, 1 + size),
        "data": _view(content[table:end], 1),
    }
    return _raw(Huffman().decode(parts, like)) + content[end:]


def _view(raw: bytes | memoryview, size: int) -> Tensor:
    if not len(raw):
        return torch.empty(0, dtype=_DTYPES[size])
    return torch.frombuffer(bytearray(raw), dtype=_DTYPES[size])


def _raw(x: Tensor) -> bytes:
    return bytes(as_bytes(x).numpy())
