"""SparseGPT and GPTQ of a whole model, against llm-compressor: perplexity, CPU time, memory.

    python benchmarks/recipes.py [--folder FOLDER] [--quick]

In an environment of its own: `pip install llmcompressor`, and this project. Both get the same
byte-level Llama (that of quality.py) and the same batches. One thread; one process per run,
interleaved; minimum time and memory of three runs.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import measure
import torch
from quality import Llama
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

PEER = "llm-compressor"
REPEATS = 3
CASES = ("50 % SparseGPT", "70 % SparseGPT", "2:4 SparseGPT", "W4 g128 GPTQ")


def main():
    parser = measure.options(__doc__)
    parser.add_argument("--folder", type=Path, default=measure.RESULTS / "quality")
    parser.add_argument("--run", nargs=2, help="what a process of its own is started with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    llama = Llama(options.folder, quick=options.quick)
    if options.run:
        print(json.dumps(run(llama, *options.run)))
        return
    report = measure.Report("recipes", quick=options.quick)
    for case in CASES:
        turns = [
            {who: started(options, case, who) for who in ("slimtensors", PEER)}
            for _ in range(1 if options.quick else REPEATS)
        ]
        found = {who: {k: min(x[who][k] for x in turns) for k in turns[0][who]} for who in turns[0]}
        ours, theirs = found["slimtensors"], found[PEER]
        for who, row in found.items():
            cells = f"{row['perplexity']:.4f} | {row['cpu']:.1f} s | {row['peak'] / 1e6:.0f} MB"
            print(f"| {case} | {who} | {cells} |", flush=True)
            report.rows.append({"case": case, "who": who, **row})
        worse = ours["perplexity"] / theirs["perplexity"]
        report.at_most(f"{case}: perplexity", worse, 1.01)
        report.at_most(f"{case}: CPU time", ours["cpu"] / theirs["cpu"], 1.0)
        report.at_most(f"{case}: peak memory", ours["peak"] / theirs["peak"], 1.0)
    report.finish()


def started(options, case, who):
    command = [sys.executable, __file__, "--folder", options.folder, "--run", case, who]
    command += ["--quick"] * options.quick
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith("{")))


def run(llama, case, who):
    model = llama.load()
    prepared = peer(case, llama.data) if who == PEER else ours(case, llama.data)
    with measure.peak_memory() as risen:
        begin = time.process_time()
        prepared(model)
        cpu = time.process_time() - begin
    with torch.no_grad():
        return {"perplexity": llama.measure(model), "cpu": cpu, "peak": risen["peak"]}


def ours(case, batches):
    from slimtensors.recipe import GPTQ, Recipe, SparseGPT
    from slimtensors.recipe.oneshot import apply_recipe

    recipe = Recipe.of(
        {
            "50 % SparseGPT": SparseGPT(0.5),
            "70 % SparseGPT": SparseGPT(0.7),
            "2:4 SparseGPT": SparseGPT(mask_structure="2:4"),
            "W4 g128 GPTQ": GPTQ("W4A16"),
        }[case]
    )
    return lambda model: apply_recipe(model, recipe, batches)


def peer(case, batches):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.pruning import SparseGPTModifier
    from llmcompressor.modifiers.quantization import GPTQModifier

    which = {"targets": ["Linear"], "ignore": ["re:.*lm_head"]}
    if "GPTQ" in case and "Sparse" not in case:
        recipe = GPTQModifier(**which, scheme="W4A16", actorder=None)
    else:
        sparsity = 0.7 if case.startswith("70") else 0.5
        structure = "2:4" if case.startswith("2:4") else "0:0"
        recipe = SparseGPTModifier(**which, sparsity=sparsity, mask_structure=structure)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    data = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    options = {
        "dataset": Dataset.from_dict(data),
        "num_calibration_samples": len(ids),
        "max_seq_length": ids.shape[1],
        "batch_size": len(batches[0]["input_ids"]),
        "shuffle_calibration_samples": False,
        "processor": tokenizer(),
    }
    return lambda model: oneshot(model=model, recipe=recipe, **options)


def tokenizer():
    """Return a tokenizer, which llm-compressor requires but does not use for token ids."""
    words = Tokenizer(models.WordLevel({"?": 0}, unk_token="?"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?")


if __name__ == "__main__":
    main()
