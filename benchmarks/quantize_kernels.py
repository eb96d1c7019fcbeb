"""Quantized formats of one 4096 x 4096 bf16 weight on one thread, against compressed-tensors 0.20.

Claims, by CPU time: W4A16 in groups of 128 is decompressed at least 15 times as fast, into mapped
memory, and compressed at least 10 times as fast (rounding to nearest, with and without computing
the scales); packing of 4-bit integers at least 50 times; NVFP4 at least 10 times both ways;
and none needs more memory than its result and a tenth of the dense tensor.

Results are bitwise equal, in fresh memory unless noted. The peer's memory may be fresh or reused,
as the C library's allocator decides; with reused memory the peer takes half as long.
"""

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from compressed_tensors.quantization import QuantizationArgs as TheirArgs
from compressed_tensors.quantization import QuantizationScheme as TheirScheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from measure import Case, Report, Timing, interleaved, options, peak_memory, same_bits
from torch import Tensor

from slimtensors import _core
from slimtensors.quantization import QuantizationArgs, formats
from slimtensors.quantization import kernels as bits
from slimtensors.quantization.affine import find_params, quantize
from slimtensors.tensor import as_bytes

PEER = "compressed-tensors 0.20"
FP8_SCALES = {"scale_dtype": torch.float8_e4m3fn}
W4 = {"num_bits": 4, "strategy": "group", "group_size": 128}
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16, **FP8_SCALES}
SCHEMES: dict[str, tuple[str, dict[str, Any], float | None, float | None]] = {
    "W4A16 g128": ("pack-quantized", W4, 10, 15),
    "W4A16 g128 asymmetric": ("pack-quantized", {**W4, "symmetric": False}, 10, 15),
    "NVFP4": ("nvfp4-pack-quantized", NVFP4, 10, 10),
    "W3A16 g128": ("pack-quantized", {**W4, "num_bits": 3}, None, None),
    "W8A8 channel": ("int-quantized", {"num_bits": 8, "strategy": "channel"}, None, None),
    "FP8 channel": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "channel"},
        None,
        None,
    ),
}
"""Format, arguments, and claimed speedups of compressing and decompressing."""


def main() -> None:
    parser = options(__doc__)
    args = parser.parse_args()
    torch.set_num_threads(1)
    side, repeats = (512, 3) if args.quick else (4096, 9)
    report = Report("quantize_kernels", quick=args.quick)
    x = torch.randn(side, side, generator=torch.Generator().manual_seed(0)).mul(0.02).bfloat16()
    packing(report, x, repeats)
    for title, (name, given, compress, decompress) in SCHEMES.items():
        scheme(report, f"{title} ({name})", x, name, given, repeats, (compress, decompress))
    report.finish()


def packing(report: Report, x: Tensor, repeats: int) -> None:
    args = QuantizationArgs(**W4)
    codes = quantize(x, find_params(x, args), args)
    words = bits.pack_bits(codes, 4)
    assert same_bits(words, pack_to_int32(codes, 4))
    assert same_bits(
        bits.unpack_bits(words, 4, codes.shape[1]), unpack_from_int32(words, 4, x.shape)
    )
    raw, there = as_bytes(codes), as_bytes(words)
    cases = {
        "pack": (
            lambda: bits.pack_bits(codes, 4),
            lambda: pack_to_int32(codes, 4),
            words.nbytes,
            None,
        ),
        "pack into memory that is there": (
            lambda: _core.pack_codes(raw, 4, codes.shape[1], there),
            lambda: pack_to_int32(codes, 4),
            0,
            50,
        ),
        "unpack": (
            lambda: bits.unpack_bits(words, 4, codes.shape[1]),
            lambda: unpack_from_int32(words, 4, x.shape),
            codes.nbytes,
            None,
        ),
    }
    compare(report, "int4 codes", x, cases, repeats)


def scheme(
    report: Report,
    title: str,
    x: Tensor,
    name: str,
    given: dict[str, Any],
    repeats: int,
    claims: tuple[float | None, float | None],
) -> None:
    ours, args = formats.find(name), QuantizationArgs(**given)
    peer = BaseCompressor.get_value_from_registry(name)
    theirs = TheirScheme(targets=[], weights=TheirArgs(**given))
    params = find_params(x, args)
    found = {
        "weight": x,
        "weight_scale": params.scale,
        "weight_zero_point": params.zero_point,
        "weight_global_scale": params.global_scale,
    }
    state = {key: value for key, value in found.items() if value is not None}
    parts = ours.compress(x, params, args)
    stored = peer.compress(state, theirs)
    assert all(same_bits(part, stored[suffix]) for suffix, part in parts.items())
    dense = ours.decompress(parts, args)
    assert same_bits(dense, peer.decompress(stored, theirs)["weight"])
    size = sum(part.nbytes for part in parts.values())
    cases = {
        "decompress": (
            lambda: ours.decompress(parts, args),
            lambda: peer.decompress(stored, theirs),
            dense.nbytes,
            None,
        ),
        "decompress into memory that is there": (
            lambda: ours.decompress(parts, args, out=dense),
            lambda: peer.decompress(stored, theirs),
            0,
            claims[1],
        ),
        "compress, scales given": (
            lambda: ours.compress(x, params, args),
            lambda: peer.compress(state, theirs),
            size,
            claims[0],
        ),
        "compress, scales found": (
            lambda: ours.compress(x, find_params(x, args), args),
            lambda: peer.compress(their_state(x, theirs.weights), theirs),
            size,
            claims[0],
        ),
    }
    compare(report, title, x, cases, repeats)


def their_state(x: Tensor, args: TheirArgs) -> dict[str, Tensor]:
    """Return the input of their compressor, with scales computed by their observers."""
    groups = x.unflatten(1, (-1, args.group_size)) if args.group_size else x.unsqueeze(1)
    low, high = torch.aminmax(groups, dim=-1)
    whole = {}
    if args.strategy == "tensor_group":
        whole["weight_global_scale"] = generate_gparam(low.min(), high.max())
    scale, zero = calculate_qparams(low, high, args, whole.get("weight_global_scale"))
    if not args.symmetric:
        whole["weight_zero_point"] = zero
    return {"weight": x, "weight_scale": scale, **whole}


def compare(
    report: Report,
    title: str,
    x: Tensor,
    cases: dict[str, tuple[Case, Case, int, float | None]],
    repeats: int,
) -> None:
    timed: dict[str, Callable[[], object]] = {}
    for what, (ours, theirs, _, _) in cases.items():
        timed[what] = ours
        timed[f"{what}, {PEER}"] = theirs
    few = {f"{what}, {PEER}": 3 for what in cases}
    timings: dict[str, Timing] = interleaved(timed, repeats, slow=few)
    report.table(title, timings, size=x.nbytes)
    for what, (ours, _, size, target) in cases.items():
        ratio = timings[f"{what}, {PEER}"].busy / timings[what].busy
        if target is not None:
            report.at_least(f"{title}: {what} against {PEER}", ratio, target)
        else:
            print(f"         {title}: {what} against {PEER}: {ratio:.1f} x")
        with peak_memory() as risen:
            result = ours()
        extra = (risen["peak"] - size) / x.nbytes
        del result
        report.at_most(f"{title}: {what}, memory besides the result", extra, 0.1, "x dense")


if __name__ == "__main__":
    main()
