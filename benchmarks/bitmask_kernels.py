"""Bitmask coding of one 4096 x 4096 tensor on one thread, in memory that is already mapped.

Claims: decoding is at least 20 times as fast as compressed-tensors 0.14.0.1 and no slower than
memcpy of the dense bytes; encoding is at least 20 times as fast as compressed-tensors. They are
measured in CPU time: long runs of a peer are disturbed more by other processes than short ones.

"kernel" calls the C++ functions on the whole tensor, with memory that is already mapped.
Caches are "warm" after four runs of the same call, "cold" after a sweep through other memory.
"codec" is what `save` and `load` call: chunked, with results in fresh memory like the peer's.
"""

from collections.abc import Iterable

import torch
from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import (
    sparse24_bitmask_compress,
    sparse24_bitmask_decompress,
)
from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import (
    bitmask_compress,
    bitmask_decompress,
)
from measure import PEER, Case, Report, interleaved, memcpy, options, same_bits, sparse
from torch import Tensor

from slimtensors import _core
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.tensor import Spec, as_bytes

DECODE, ENCODE = "decode, kernel", "encode, kernel"
DENSE_COPY = "memcpy of the dense bytes"


def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    side, repeats = (1024, 5) if args.quick else (4096, 21)
    report = Report("bitmask_kernels", quick=args.quick)
    for dtype, density in (
        (torch.bfloat16, 0.5),
        (torch.bfloat16, 0.06),
        (torch.float32, 0.5),
        (torch.int8, 0.5),
    ):
        x = sparse((side, side), dtype, density)
        title = f"{str(dtype)[6:]} {side} x {side}, density {density:.0%}"
        claimed = dtype is torch.bfloat16
        run(report, title, x, bitmask_cases(x), repeats, claimed=claimed)
    x = two_four(sparse((side, side), torch.bfloat16, 1.0))
    run(report, f"bfloat16 {side} x {side}, 2:4", x, two_four_cases(x), repeats, claimed=False)
    report.finish()


def run(
    report: Report, title: str, x: Tensor, cases: dict[str, Case], repeats: int, *, claimed: bool
) -> None:
    """Time one tensor and check its claims."""
    copy = mapped(x.nbytes)
    cases |= {
        DENSE_COPY: lambda: memcpy(copy, as_bytes(x)),
        "torch copy_ of the dense bytes": lambda: copy.copy_(as_bytes(x)),
    }
    few = dict.fromkeys(peers(cases), 2 if repeats < 10 else 5)
    for state, runs in (("warm", 4), ("cold", 0)):
        timings = interleaved(cases, repeats, slow=few, warm=runs)
        named = f"{title}, caches {state}"
        report.table(named, timings, size=x.nbytes, against=DENSE_COPY)
        if claimed:
            claim(report, named, {case: timing.busy for case, timing in timings.items()})


def claim(report: Report, title: str, cpu: dict[str, float]) -> None:
    decode, encode = peers(cpu)
    report.at_least(f"{title}: decode against {PEER}", cpu[decode] / cpu[DECODE], 20)
    report.at_least(f"{title}: decode against memcpy", cpu[DENSE_COPY] / cpu[DECODE], 1)
    report.at_least(f"{title}: encode against {PEER}", cpu[encode] / cpu[ENCODE], 20)
    codec = cpu[encode] / cpu["encode, codec"]
    report.at_least(f"{title}: encode, whole codec, against {PEER}", codec, 20)


def peers(cases: Iterable[str]) -> list[str]:
    return [case for case in cases if case.endswith(PEER)]


def bitmask_cases(x: Tensor) -> dict[str, Case]:
    items, size, row = as_bytes(x), x.element_size(), x.numel()
    mask = mapped(row // 8)
    values = mapped(_core.bitmask_find(items, size, row, mask) * size)
    out = mapped(x.nbytes)

    def encode() -> None:
        _core.bitmask_find(items, size, row, mask)
        _core.bitmask_gather(items, size, row, mask, values)

    def decode() -> None:
        _core.bitmask_scatter(mask, row, values, size, out)

    encode()
    decode()
    assert same_bits(out, items)
    theirs = bitmask_compress(x)
    assert same_bits(bitmask_decompress(theirs[0], theirs[1], x.shape), x)
    codec, parts, spec = Bitmask(), Bitmask().encode(x), Spec.of(x)
    return {
        DECODE: decode,
        "decode, codec": lambda: codec.decode(parts, spec),
        f"decode, {PEER}": lambda: bitmask_decompress(theirs[0], theirs[1], x.shape),
        ENCODE: encode,
        "encode, codec": lambda: codec.encode(x),
        f"encode, {PEER}": lambda: bitmask_compress(x),
    }


def two_four_cases(x: Tensor) -> dict[str, Case]:
    codec = Bitmask24()
    parts, spec = codec.encode(x), Spec.of(x)
    codes, values = as_bytes(parts["codes"]), as_bytes(parts["values"])
    mask, out = mapped(x.numel() // 8), mapped(x.nbytes)

    def decode() -> None:
        _core.mask24_unpack(codes, mask)
        _core.bitmask_scatter(mask, x.numel(), values, x.element_size(), out)

    decode()
    assert same_bits(out, as_bytes(x))
    theirs = sparse24_bitmask_compress(x)
    assert same_bits(sparse24_bitmask_decompress(*theirs, x.shape), x)
    return {
        DECODE: decode,
        "decode, codec": lambda: codec.decode(parts, spec),
        f"decode, {PEER}": lambda: sparse24_bitmask_decompress(*theirs, x.shape),
        "encode, codec": lambda: codec.encode(x),
        f"encode, {PEER}": lambda: sparse24_bitmask_compress(x),
    }


def two_four(x: Tensor) -> Tensor:
    """Set the two smallest of every four neighbours to zero."""
    groups = x.view(-1, 4)
    small = groups.abs().float().topk(2, largest=False).indices
    return groups.scatter(1, small, 0).view(x.shape)


def mapped(size: int) -> Tensor:
    """Return a buffer whose pages are already mapped."""
    return torch.zeros(size, dtype=torch.uint8).fill_(1)


if __name__ == "__main__":
    main()
