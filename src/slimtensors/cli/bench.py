"""`slimtensors bench`: our presets and other compressors on your own tensors."""

import argparse
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from slimtensors import presets
from slimtensors.archive import Archive
from slimtensors.archive.workers import Workers
from slimtensors.cli import console
from slimtensors.container import parse_size
from slimtensors.errors import ConfigError
from slimtensors.peers import PEERS, Coder
from slimtensors.plan import Encoded, decode, encode
from slimtensors.presets import Choice, Chooser
from slimtensors.spec import Each, Spec, as_bytes
from slimtensors.summary import counted, human

_LOSSY = {"extreme"}
_HEAD = ("coder", "size", "bits/item", "encode", "decode", "back")


@dataclass(frozen=True)
class Figures:
    """What one coder did."""

    name: str
    bytes: int
    encode_seconds: float
    decode_seconds: float
    back: str
    """`same bits`, `lossy`, or what went wrong."""


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "bench",
        "compare our presets with other compressors on your tensors",
        "slimtensors bench my-model --limit 1GB",
        "slimtensors bench my-model --threads 2 --repeats 5 --json",
    )
    console.add_source(verb)
    verb.add_argument("--limit", default="256MB", metavar="SIZE", help="use no more than so much")
    verb.add_argument("--repeats", type=int, default=3, metavar="N", help="count the best of these")
    verb.add_argument(
        "-T", "--threads", type=int, default=1, metavar="N", help="threads of each (default: 1)"
    )
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table, and answer 1 if anything but a lossy preset did not give the bits back."""
    limit = parse_size(options.limit)
    if not limit or limit < 1 or options.repeats < 1:
        raise ConfigError("bench needs a --limit of at least 1 byte and 1 of --repeats")
    with Archive(options.source) as archive:
        archive.check_whole()
        tensors = list(_sample(archive, limit))
        whole = console.dense_bytes(archive)
    used = sum(x.nbytes for x in tensors)
    if not used:
        raise ConfigError(f"{options.source}: holds nothing to compress")
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
        print(console.table(_HEAD, [_row(r, used, items) for r in results.values()], left=1))
        of = "" if used == whole else f" of {human(whole)}, chosen at random"
        what = f"{human(used)}{of} in {counted(len(tensors), 'tensor')}"
        threads = counted(options.threads, "thread")
        print(f"{what}; GB/s of {_clock(options.threads)} time, {threads}")
        for name, package in missing.items():
            print(f"{name}: not installed: pip install {package}")
    wrong = any(r.back not in ("same bits", "lossy") for r in results.values())
    return 1 if wrong else 0


def _sample(archive: Archive, limit: int) -> Iterator[Tensor]:
    """Yield tensors in an order that does not change, until there is enough."""
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
        f"{name} (lossy)" if name in _LOSSY else name: _ours(choose, each)
        for name, choose in presets.PRESETS.items()
    }
    return ours | {name: peer.coder(threads) for name, peer in PEERS.items() if peer.is_installed}


def _ours(choose: Chooser, each: Each) -> Coder:
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
            given = coder.decompress(stored, Spec.of(x))
            end = now()
        except Exception as error:  # whatever a peer raises is a result, too
            return Figures(name, 0, 0.0, 0.0, f"failed on {x.dtype}: {error}")
        size += coder.size(stored)
        encoding += middle - start
        decoding += end - middle
        if back == "same bits" and not _same(given, x):
            back = f"DIFFERENT for {x.dtype}"
    return Figures(name, size, encoding, decoding, back)


def _same(given: object, x: Tensor) -> bool:
    raw = given.numpy() if isinstance(given, Tensor) else np.frombuffer(given, np.uint8)  # type: ignore[call-overload]
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
