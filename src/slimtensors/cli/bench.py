"""`slimtensors bench`: compare our presets with other compressors on your tensors."""

import argparse
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slimtensors.archive import Archive
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import count_noun, format_bytes, format_table
from slimtensors.cli import console
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Encoded, decode, encode
from slimtensors.codecs.presets import Choice, Chooser
from slimtensors.errors import ConfigError
from slimtensors.parallel import Each, Workers
from slimtensors.storage import parse_size
from slimtensors.tensor import Spec, as_bytes

_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64, 16: np.uint64}


@dataclass(frozen=True)
class Coder:
    """A compressor of tensors in main memory."""

    compress: Callable[[Tensor], Any]
    decompress: Callable[[Any, Spec], Any]
    """Returns any buffer."""
    size: Callable[[Any], int] = len


@dataclass(frozen=True)
class Peer:
    """A compressor of another package, which may be missing."""

    package: str
    """Its name on PyPI."""
    module: str
    coder: Callable[[int], Coder]
    """Takes the number of threads; some ignore it."""

    @property
    def is_installed(self) -> bool:
        """Whether its module can be imported."""
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
            return for_floats.compress(x.clone())  # it overwrites its input
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
        words = _words(x)  # `Input` does not keep it alive
        blob = context.compress([ext.Input(ext.Type.Numeric, words)])
        del words
        return blob

    def decompress(blob: Any, spec: Spec) -> Any:
        output = ext.DCtx().decompress(blob)[0]
        return output.content.as_nparray().copy()  # a view of the output's memory

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


_LOSSY = {"extreme"}
_HEAD = ("coder", "size", "bits/item", "encode", "decode", "back")


@dataclass(frozen=True)
class Figures:
    """The results of one coder."""

    name: str
    bytes: int
    encode_seconds: float
    decode_seconds: float
    back: str
    """`same bits`, `lossy`, or the failure."""


EXAMPLES = (
    "slimtensors bench my-model --limit 1GB",
    "slimtensors bench my-model --threads 2 --repeats 5 --json",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    verb.add_argument(
        "--limit", default="256MB", metavar="SIZE", help="maximum data to use (default: 256MB)"
    )
    verb.add_argument(
        "--repeats",
        type=int,
        default=3,
        metavar="N",
        help="repetitions, of which the fastest is reported (default: 3)",
    )
    verb.add_argument(
        "-T",
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads per compressor (default: 1)",
    )
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Print the table; return 1 if a lossless coder did not return the same bits."""
    limit = parse_size(options.limit)
    if not limit or limit < 1 or options.repeats < 1:
        raise ConfigError("--limit and --repeats must be at least 1")
    console.require_models(options.source)
    with open_archive(options.source) as archive:
        archive.check_not_delta()
        tensors = list(_sample(archive, limit))
        whole = console.dense_bytes(archive)
    used = sum(x.nbytes for x in tensors)
    if not used:
        raise ConfigError(f"{options.source} contains no data to compress")
    missing = {name: peer.package for name, peer in PEERS.items() if not peer.is_installed}
    with Workers(options.threads) as workers:
        torch.set_num_threads(options.threads)
        coders = _coders(workers.each, options.threads)
        rounds = options.repeats * len(coders) * used
        with console.progress(rounds, "bench") as bar:
            results: dict[str, Figures] = {}
            for _ in range(options.repeats):
                for name, coder in coders.items():
                    results[name] = _best(
                        results.get(name), _measure(name, coder, tensors, options)
                    )
                    bar(used)
    items = sum(x.numel() for x in tensors)
    if options.json:
        console.print_json(
            {
                "bytes": used,
                "of_bytes": whole,
                "items": items,
                "tensors": len(tensors),
                "threads": options.threads,
                "clock": _clock(options.threads),
                "coders": [asdict(result) for result in results.values()],
                "missing": missing,
            }
        )
    else:
        print(format_table(_HEAD, [_row(r, used, items) for r in results.values()], left=1))
        of = "" if used == whole else f" of {format_bytes(whole)}, chosen at random"
        sample = f"{format_bytes(used)}{of} in {count_noun(len(tensors), 'tensor')}"
        threads = count_noun(options.threads, "thread")
        print(f"{sample}; GB/s of {_clock(options.threads)} time, {threads}")
        for name, package in missing.items():
            print(f"{name}: not installed: pip install {package}")
    failed = any(r.back not in ("same bits", "lossy") for r in results.values())
    return 1 if failed else 0


def _sample(archive: Archive, limit: int) -> Iterator[Tensor]:
    """Yield tensors in a fixed random order until `limit` bytes are reached."""
    tied = archive.tied()
    names = [name for name in archive if name not in tied and archive.spec(name).numel]
    random.Random(0).shuffle(names)
    for name in names:
        x = archive.get_tensor(name)
        x = _first_rows(x.int_repr() if x.is_quantized else x, limit)
        yield x
        limit -= x.nbytes
        if limit <= 0:
            return


def _first_rows(x: Tensor, limit: int) -> Tensor:
    if x.nbytes <= limit or x.dim() == 0:
        return x
    return x[: max(limit * len(x) // x.nbytes, 1)]


def _coders(each: Each, threads: int) -> Mapping[str, Coder]:
    ours = {
        f"{name} (lossy)" if name in _LOSSY else name: _preset_coder(choose, each)
        for name, choose in presets.PRESETS.items()
    }
    return ours | {name: peer.coder(threads) for name, peer in PEERS.items() if peer.is_installed}


def _preset_coder(choose: Chooser, each: Each) -> Coder:
    def compress(x: Tensor) -> Tensor | Encoded:
        choice = choose("", x)
        plan = choice.plan if isinstance(choice, Choice) else choice
        return x.clone() if plan is None else encode(plan, x, each)

    def decompress(stored: Tensor | Encoded, spec: Spec) -> Tensor:
        back = decode(stored, each) if isinstance(stored, Encoded) else stored.clone()
        return as_bytes(back)

    def size(stored: Tensor | Encoded) -> int:
        if isinstance(stored, Tensor):
            return stored.nbytes
        return min(sum(leaf.nbytes for _, leaf in stored.leaves()), stored.spec.nbytes)

    return Coder(compress, decompress, size)


def _measure(
    name: str, coder: Coder, tensors: Sequence[Tensor], options: argparse.Namespace
) -> Figures:
    now = time.process_time if options.threads == 1 else time.perf_counter
    size, encoding, decoding = 0, 0.0, 0.0
    back = "lossy" if name.endswith("(lossy)") else "same bits"
    for x in tensors:
        try:
            start = now()
            stored = coder.compress(x)
            middle = now()
            restored = coder.decompress(stored, Spec.of(x))
            end = now()
        except Exception as error:  # a failing compressor is reported, not raised
            return Figures(name, 0, 0.0, 0.0, f"failed on {x.dtype}: {error}")
        size += coder.size(stored)
        encoding += middle - start
        decoding += end - middle
        if back == "same bits" and not _is_same(restored, x):
            back = f"DIFFERENT for {x.dtype}"
    return Figures(name, size, encoding, decoding, back)


def _is_same(restored: object, x: Tensor) -> bool:
    raw = restored.numpy() if isinstance(restored, Tensor) else np.frombuffer(restored, np.uint8)  # type: ignore[call-overload]
    return np.array_equal(raw, as_bytes(x).numpy())


def _best(old: Figures | None, new: Figures) -> Figures:
    if old is None:
        return new
    return Figures(
        new.name,
        new.bytes,
        min(old.encode_seconds, new.encode_seconds),
        min(old.decode_seconds, new.decode_seconds),
        new.back,
    )


def _clock(threads: int) -> str:
    return "CPU" if threads == 1 else "wall"


def _row(result: Figures, used: int, items: int) -> tuple[str, ...]:
    if not result.bytes:
        return (result.name, "", "", "", "", result.back)
    speeds = (used / 1e9 / max(t, 1e-9) for t in (result.encode_seconds, result.decode_seconds))
    return (
        result.name,
        f"{100 * result.bytes / used:.2f} %",
        f"{8 * result.bytes / items:.2f}",
        *(f"{speed:.2f} GB/s" for speed in speeds),
        result.back,
    )
