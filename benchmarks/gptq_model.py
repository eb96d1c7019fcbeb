"""GPTQ of a whole language model, against llm-compressor: CPU time, memory, perplexity.

    python benchmarks/gptq_model.py MODEL CALIBRATION EVALUATION [--threads N] [--quick]

In an environment of its own: `pip install llmcompressor`, and this project. MODEL is a folder, such
as SmolLM2-135M; the others are text files. Both quantize the same layers to W4A16 with the same
group sizes, on the same 64 samples of 512 tokens, in the dtype of the folder. One process per run.
Time and memory are those of `oneshot` without saving.
"""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import measure
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from slimtensors.recipe import GPTQ, Calibration
from slimtensors.recipe.calibration import batches_for
from slimtensors.recipe.oneshot import make_config

PEER = "llm-compressor"
LENGTH = 512


def main():
    parser = measure.options(__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs=2, type=Path, metavar="TEXT")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--run", help="what a process of its own is started with")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.run:
        print(json.dumps(run(options)))
        return
    report = measure.Report("gptq_model", quick=options.quick)
    found = {who: start(who) for who in ("dense", "slimtensors", PEER)}
    for who, row in found.items():
        cells = f"{row['perplexity']:.3f} | {row['cpu']:.1f} s | {row['peak'] / 1e6:.0f} MB"
        print(f"| {who} | {cells} |", flush=True)
        report.rows.append({"case": who, **row})
    ours, theirs = found["slimtensors"], found[PEER]
    report.at_most("CPU time", ours["cpu"] / theirs["cpu"], 0.8)
    report.at_most("peak memory", ours["peak"] / theirs["peak"], 1.0)
    report.at_most("perplexity", ours["perplexity"] / theirs["perplexity"], 1.01)
    report.finish()


def start(who):
    command = [sys.executable, __file__, *sys.argv[1:], "--run", who]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(next(x for x in done.stdout.splitlines() if x.startswith('{"')))


def run(options):
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype="auto").eval()
    samples = 8 if options.quick else 64
    batches, _ = batches_for(
        model, options.texts[0], Calibration(samples, LENGTH), tokenizer=tokenizer
    )
    prepare = {"dense": dense, "slimtensors": ours, PEER: peer}[options.run]
    quantize = prepare(model, batches, tokenizer)
    with measure.peak_memory() as risen:
        begin = time.process_time()
        quantize()
        cpu = time.process_time() - begin
    tokens = tokenizer(options.texts[1].read_text(), verbose=False)["input_ids"]
    perplexity = measure_perplexity(model, tokens[: LENGTH * (2 if options.quick else 16)])
    return {"perplexity": perplexity, "cpu": cpu, "peak": risen["peak"]}


def dense(model, batches, tokenizer):
    return lambda: None


def ours(model, batches, tokenizer):
    from slimtensors.transformers import oneshot

    return lambda: oneshot(model, GPTQ("W4A16"), batches, tokenizer=tokenizer)


def peer(model, batches, tokenizer):
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    groups = make_config(model, GPTQ("W4A16")).to_dict()["config_groups"]
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"], actorder=None)
    ids = torch.cat([batch["input_ids"] for batch in batches])
    data = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    options = {
        "dataset": Dataset.from_dict(data),
        "num_calibration_samples": len(ids),
        "max_seq_length": LENGTH,
        "batch_size": len(batches[0]["input_ids"]),
        "shuffle_calibration_samples": False,
        "processor": tokenizer,
    }
    return lambda: oneshot(model=model, recipe=recipe, **options)


@torch.no_grad()
def measure_perplexity(model, tokens):
    losses = [
        model(input_ids=x, labels=x).loss.float()
        for x in torch.tensor(tokens[: len(tokens) // LENGTH * LENGTH]).view(-1, 1, LENGTH)
    ]
    return math.exp(torch.stack(losses).mean())


if __name__ == "__main__":
    main()
