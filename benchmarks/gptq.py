"""GPTQ of one layer on the CPU, against llm-compressor's.

    python benchmarks/gptq.py [--quick]

In an environment of its own: `pip install llmcompressor`, and this project. Both get the same
weight, Hessian and scales. CPU time of one thread, interleaved. Also reported: the output error
relative to rounding to nearest.
"""

from functools import partial

import measure
import torch
from compressed_tensors.quantization import QuantizationArgs as TheirArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

from slimtensors.layerwise.gptq import gptq, rtn
from slimtensors.layerwise.hessian import Hessian, output_error
from slimtensors.quantization import QuantizationArgs
from slimtensors.quantization.affine import find_params

PEER = "llm-compressor"


def main():
    parser = measure.options(__doc__)
    options = parser.parse_args()
    size = 512 if options.quick else 4096
    torch.set_num_threads(1)
    report = measure.Report("gptq", quick=options.quick)
    weight, hessian = layer(size)
    for order in (None, "weight"):
        chosen = {"num_bits": 4, "group_size": 128, "strategy": "group", "actorder": order}
        args, theirs = QuantizationArgs(**chosen), TheirArgs(**chosen)
        params = find_params(weight, args)
        cases = {
            "slimtensors": partial(ours, weight, hessian, args, params),
            PEER: partial(peer, weight, hessian, theirs, params),
        }
        timings = measure.interleaved(cases, 3, slow={PEER: 2}, warm=0)
        title = f"W4 g128, {size} x {size}, activation order {order}"
        report.table(title, timings, against=PEER)
        ratio = timings[PEER].busy / timings["slimtensors"].busy
        report.at_least(f"{title}: as fast as {PEER}", ratio, 1.0)
        nearest = output_error(weight - rtn(weight, args, params=params).weight, hessian)
        left = {
            name: output_error(weight - case(), hessian) / nearest for name, case in cases.items()
        }
        print("  error left of rounding to nearest:", {k: round(v, 4) for k, v in left.items()})
        report.rows.append({"group": title, "case": "error left", **left})
    report.finish()


def layer(size):
    """Return a weight and the Hessian of correlated inputs of different scales."""
    random = torch.Generator().manual_seed(0)
    weight = torch.randn(size, size, generator=random) / size**0.5
    mixed = torch.randn(2 * size, size, generator=random)
    mixed += mixed[:, :64] @ torch.randn(64, size, generator=random) / 4
    hessian = Hessian(size)
    hessian.add(mixed * torch.randn(size, generator=random).exp())
    return weight, hessian.mean()


def ours(weight, hessian, args, params):
    return gptq(weight, hessian, args, params=params).weight


def peer(weight, hessian, args, params):
    zeros = torch.zeros_like(params.scale, dtype=torch.int8)
    done, _, fell_back = quantize_weight(
        weight[None].clone(),  # it works in what it is given
        hessian[None].clone(),
        params.scale[None],
        zeros[None],
        None,
        args,
    )
    assert not fell_back.any()
    return done[0]


if __name__ == "__main__":
    main()
