"""Other lossless compressors, each as it suits tensors best, to be compared with."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimtensors.spec import Spec, as_bytes

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


@dataclass(frozen=True)
class Coder:
    """Compresses a tensor in main memory, and gives its bytes back."""

    compress: Callable[[Tensor], Any]
    decompress: Callable[[Any, Spec], Any]
    """Returns any buffer."""
    size: Callable[[Any], int] = len


@dataclass(frozen=True)
class Peer:
    """A compressor that may be installed."""

    package: str
    """What pip calls it."""
    module: str
    coder: Callable[[int], Coder]
    """Gets the number of threads, which some ignore."""

    @property
    def is_installed(self) -> bool:
        """Whether it can be imported."""
        return find_spec(self.module) is not None


def _zstd(threads: int) -> Coder:
    import zstandard

    coder = zstandard.ZstdCompressor(level=3, threads=threads if threads > 1 else 0)
    return Coder(
        lambda x: coder.compress(_words(x).view(np.uint8).data),
        lambda blob, spec: zstandard.ZstdDecompressor().decompress(blob),
    )


def _zipnn(threads: int) -> Coder:
    import zipnn

    floats = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
    for_floats = zipnn.ZipNN(input_format="torch", threads=threads)
    for_bytes = zipnn.ZipNN(input_format="byte", threads=threads)

    def compress(x: Tensor) -> Any:
        if x.dtype in floats:
            return for_floats.compress(x.clone())  # it overwrites what it is given
        return for_bytes.compress(bytearray(_words(x).tobytes()))

    def decompress(blob: Any, spec: Spec) -> Any:
        if spec.dtype in floats:
            return as_bytes(for_floats.decompress(blob)).numpy()
        return for_bytes.decompress(blob)

    return Coder(compress, decompress)


def _openzl(threads: int) -> Coder:
    from openzl import ext

    splits = {
        torch.float32: ext.nodes.Float32Deconstruct,
        torch.bfloat16: ext.nodes.BFloat16Deconstruct,
        torch.float16: ext.nodes.Float16Deconstruct,
    }

    def compress(x: Tensor) -> Any:
        compressor = ext.Compressor()
        graph = ext.graphs.Compress()(compressor)
        if x.dtype in splits:
            exponent = ext.graphs.Huffman()(compressor)
            graph = splits[x.dtype]()(compressor, sign_frac=graph, exponent=exponent)
        compressor.select_starting_graph(graph)
        context = ext.CCtx()
        context.ref_compressor(compressor)
        context.set_parameter(ext.CParam.FormatVersion, ext.MAX_FORMAT_VERSION)
        words = _words(x)  # held until the end: `Input` does not keep it alive
        blob = context.compress([ext.Input(ext.Type.Numeric, words)])
        del words
        return blob

    def decompress(blob: Any, spec: Spec) -> Any:
        output = ext.DCtx().decompress(blob)[0]
        return output.content.as_nparray().copy()  # it is the output's memory

    return Coder(compress, decompress)


def _pcodec(threads: int) -> Coder:
    from pcodec import ChunkConfig, standalone

    config = ChunkConfig(compression_level=8, enable_8_bit=True)
    numpy_floats = {torch.float16: np.float16, torch.float32: np.float32, torch.float64: np.float64}

    def compress(x: Tensor) -> Any:
        words = _words(x)
        return standalone.simple_compress(
            words.view(numpy_floats.get(x.dtype, words.dtype)), config
        )

    return Coder(compress, lambda blob, spec: standalone.simple_decompress(blob))


def _blosc2(threads: int) -> Coder:
    import blosc2

    def compress(x: Tensor) -> Any:
        return blosc2.compress2(
            _words(x),
            codec=blosc2.Codec.ZSTD,
            clevel=5,
            filters=[blosc2.Filter.SHUFFLE],
            typesize=x.element_size(),
            nthreads=threads,
        )

    return Coder(compress, lambda blob, spec: blosc2.decompress2(blob, nthreads=threads))


PEERS: Mapping[str, Peer] = {
    "zstd": Peer("zstandard", "zstandard", _zstd),
    "zipnn": Peer("zipnn", "zipnn", _zipnn),
    "openzl": Peer("openzl", "openzl", _openzl),
    "pcodec": Peer("pcodec", "pcodec", _pcodec),
    "blosc2": Peer("blosc2", "blosc2", _blosc2),
}


def _words(x: Tensor) -> NDArray[Any]:
    return as_bytes(x).numpy().view(_WORDS[x.element_size()])
