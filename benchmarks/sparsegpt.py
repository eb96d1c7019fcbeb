"""SparseGPT of one layer on the CPU, against llm-compressor's.

    python benchmarks/sparsegpt.py [--quick]

In an environment of its own: `pip install llmcompressor`, and this project. Both get the weight and
the Hessian of gptq.py. CPU time of one thread, interleaved. Also reported: the relative error
of the layer's outputs.
"""

from functools import partial

import measure
import torch
from gptq import PEER, layer
from llmcompressor.modifiers.pruning.sparsegpt.sgpt_sparsify import sparsify_weight

from slimtensors.layerwise.hessian import output_error
from slimtensors.layerwise.sparsegpt import sparsegpt
from slimtensors.layerwise.structure import parse_structure


def main():
    options = measure.options(__doc__).parse_args()
    size = 512 if options.quick else 2048
    torch.set_num_threads(1)
    report = measure.Report("sparsegpt", quick=options.quick)
    weight, hessian = layer(size)
    for name in ("unstructured", "2:4"):
        cases = {
            "slimtensors": partial(
                sparsegpt, weight, hessian, 0.5, structure=parse_structure(name)
            ),
            PEER: partial(peer, weight, hessian, name),
        }
        timings = measure.interleaved(cases, 3, slow={PEER: 2}, warm=0)
        title = f"50 %, {name}, {size} x {size}"
        report.table(title, timings, against=PEER)
        ratio = timings[PEER].busy / timings["slimtensors"].busy
        report.at_least(f"{title}: as fast as {PEER}", ratio, 1.0)
        whole = output_error(weight, hessian)
        lost = {who: output_error(weight - run(), hessian) / whole for who, run in cases.items()}
        print("  lost of the outputs:", {who: round(x, 6) for who, x in lost.items()})
        report.rows.append({"group": title, "case": "lost", **lost})
        report.at_most(f"{title}: error", lost["slimtensors"] / lost[PEER], 1.01)
    report.finish()


@torch.no_grad()
def peer(weight, hessian, structure):
    module = torch.nn.Linear(*weight.T.shape, bias=False)
    module.weight.copy_(weight)
    kept, size = (2, 4) if structure == "2:4" else (0, 0)
    options = (0.5, kept, size, 128, 0.01, False)
    found = sparsify_weight(module, {module: hessian.clone()}, *options)
    return found[1] if isinstance(found, tuple) else found


if __name__ == "__main__":
    main()
