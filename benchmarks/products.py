"""`F.linear` by compressed weights against dense ones, by dtype and number of inputs; one thread.

Claim: with bf16, fp16 and fp32 inputs alike, codes are multiplied at least as fast as dense weights
of the same dtype, by CPU time. For comparison, FBGEMM's int8 with dynamic inputs, which uses one
scale for all inputs instead of one per row, and a packed copy of the weight: results differ.

`ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16` is for virtual machines that announce AMX and cannot run it.
"""

import warnings

import torch
from measure import Case, Report, interleaved, options
from torch import Tensor
from torch.nn import functional

from slimtensors.quantization import (
    float8_weight_only,
    int4_weight_only,
    int8_dynamic_activation_int8_weight,
    int8_weight_only,
)

KINDS = {
    "int8": int8_weight_only(),
    "int8 g128": int8_weight_only(group_size=128),
    "int4 g128": int4_weight_only(),
    "fp8": float8_weight_only(),
    "int8, dynamic inputs": int8_dynamic_activation_int8_weight(),
}
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def main() -> None:
    args = options(__doc__).parse_args()
    torch.set_num_threads(1)
    report = Report("products", quick=args.quick)
    size = 256 if args.quick else 2048
    weight = torch.randn(size, size, generator=torch.Generator().manual_seed(0)) / size**0.5
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        dense = weight.to(dtype)
        weights: dict[str, Tensor] = {"dense": dense}
        weights |= {name: compress(dense) for name, compress in KINDS.items()}
        for count in COUNTS:
            x = torch.randn(count, size).to(dtype)
            cases = {name: product(x, each) for name, each in weights.items()}
            cases["FBGEMM"] = of_fbgemm(x, weight)
            with torch.inference_mode():
                times = interleaved(cases, 2 if args.quick else 7)
            report.table(f"{dtype}, {count} inputs", times, against="dense")
            for name in KINDS:
                speed = times["dense"].busy / times[name].busy
                report.at_least(f"{name}, {dtype}, {count} inputs", speed, 1)
    report.finish()


def product(x: Tensor, weight: Tensor) -> Case:
    return lambda: functional.linear(x, weight)


def of_fbgemm(x: Tensor, weight: Tensor) -> Case:
    torch.backends.quantized.engine = "fbgemm"
    scales, zeros = weight.abs().amax(1) / 127, torch.zeros(len(weight), dtype=torch.long)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that quantized tensors are deprecated
        codes = torch.quantize_per_channel(weight, scales, zeros, 0, torch.qint8)
    packed = torch.ops.quantized.linear_prepack(codes, None)
    return lambda: torch.ops.quantized.linear_dynamic(x.float(), packed, False).to(x.dtype)


if __name__ == "__main__":
    main()
