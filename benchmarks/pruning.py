"""What pruning in one shot does to a model that was really trained, and to which bits it leads.

    python benchmarks/pruning.py [--folder FOLDER] [--quick]

Needs `pip install transformers`. The byte-level Llama is that of quality.py, trained in a few
minutes on one core and kept in the folder. Perplexity is per byte, of modules of Python's standard
library that it has not seen; calibration data is apart from what is measured.
"""

from pathlib import Path

import measure
import torch
from quality import Llama

from slimtensors.recipe import GPTQ, MagnitudePruning, Quantize, Recipe, SparseGPT, Wanda
from slimtensors.recipe.oneshot import apply_recipe

METHODS = {"magnitude": MagnitudePruning, "Wanda": Wanda, "SparseGPT": SparseGPT}


def main():
    parser = measure.options(__doc__)
    parser.add_argument("--folder", type=Path, default=measure.RESULTS / "quality")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure.Report("pruning", quick=options.quick)
    llama = Llama(options.folder, quick=options.quick)
    scores = {}
    for name, recipe in cases().items():
        scores[name] = score(llama, recipe)
        print(f"| {name} | {scores[name]:.3f} |", flush=True)
        report.rows.append({"case": name, "perplexity": scores[name]})
    for zeros in ("50 %", "60 %", "70 %", "2:4"):
        ours = [scores[f"{zeros}, {method}"] for method in METHODS]
        report.at_most(f"{zeros}: Wanda / magnitude", ours[1] / ours[0], 1.0)
        report.at_most(f"{zeros}: SparseGPT / Wanda", ours[2] / ours[1], 1.0)
    for bits in (4, 3):
        pair = [scores[f"W{bits} g128, {method}"] for method in ("GPTQ", "nearest")]
        report.at_most(f"W{bits}: GPTQ / nearest", pair[0] / pair[1], 1.0)
    report.finish()


def cases():
    """Return recipes by name; none leaves the model as it is."""
    table = {"dense": None}
    for share in (0.5, 0.6, 0.7):
        for name, method in METHODS.items():
            table[f"{share:.0%}, {name}".replace("%", " %")] = [method(share)]
    for name, method in METHODS.items():
        table[f"2:4, {name}"] = [method(mask_structure="2:4")]
    for bits in (4, 3):
        table[f"W{bits} g128, nearest"] = [Quantize(f"W{bits}A16")]
        table[f"W{bits} g128, GPTQ"] = [GPTQ(f"W{bits}A16")]
    for zeros in ({"sparsity": 0.5}, {"mask_structure": "2:4"}):
        name = zeros.get("mask_structure", "50 %")
        table[f"{name}, SparseGPT, then W4 GPTQ"] = [SparseGPT(**zeros), GPTQ("W4A16")]
        table[f"{name}, W4 GPTQ, then SparseGPT"] = [GPTQ("W4A16"), SparseGPT(**zeros)]
    table["70 %, SparseGPT, OWL"] = [SparseGPT(0.7, sparsity_profile="owl")]
    table["4:8, SparseGPT"] = [SparseGPT(mask_structure="4:8")]
    table["8:16, SparseGPT"] = [SparseGPT(mask_structure="8:16")]
    table["16x16 blocks, 50 %, SparseGPT"] = [SparseGPT(0.5, mask_structure="16x16")]
    return table


def score(llama, recipe):
    model = llama.load()
    if recipe is not None:
        apply_recipe(model, Recipe.of(recipe), llama.data)
    with torch.no_grad():
        return llama.measure(model)


if __name__ == "__main__":
    main()
