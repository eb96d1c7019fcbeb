"""The judge of fit.py: how far a model's predictions are from the teacher's.

One evaluator for every method: weights are replaced in the teacher, the model runs in float32, and
its predictions on the evaluation tokens are compared with the teacher's, token by token. Results
are kept by a hash of the weights, sequence by sequence, so that a killed run continues.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

LENGTH = 512
SEQUENCES = 40
"""Evaluation sequences: 20,480 tokens."""


@dataclass(frozen=True)
class Quality:
    """Distance from the teacher on the evaluation tokens."""

    tokens: int
    kl: float
    """Mean divergence in nats per token."""
    kl_error: float
    """Standard error of the mean over sequences, of the difference from zero."""
    perplexity: float
    top1: float
    """Share of positions at which both models predict the same token."""
    sequences: list[list[float]]
    """Sums of each sequence: divergence, negative log-likelihood, agreements, tokens."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class EmbeddingQuality:
    """Distance of normalized sentence embeddings from the teacher's."""

    tokens: int
    distance: float
    """One minus the cosine, mean over passages."""
    relative_error: float
    """Root of the mean squared distance: vectors have length 1."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


PASSAGES, PASSAGE_LENGTH = 256, 128


class EmbeddingEvaluator:
    """An encoder and its mean-pooled, normalized embeddings of passages."""

    def __init__(self, teacher: Path, text: Path, cache: Path, sequences: int = PASSAGES) -> None:
        self._model = AutoModel.from_pretrained(teacher, dtype=torch.float32).eval()
        self._model.requires_grad_(requires_grad=False)
        self._dense = {name: x.clone() for name, x in self._model.named_parameters()}
        tokenizer = AutoTokenizer.from_pretrained(teacher)
        passages = [p for p in text.read_text().split("\n") if len(p) > 200][:sequences]
        self._batches = [
            tokenizer(
                passages[i : i + 16],
                padding=True,
                truncation=True,
                max_length=PASSAGE_LENGTH,
                return_tensors="pt",
            )
            for i in range(0, len(passages), 16)
        ]
        self._reference = self._embed()

    @property
    def parameters(self) -> int:
        return sum(x.numel() for x in self._dense.values())

    def evaluate(
        self, weights: Mapping[str, Tensor], sequences: int | None = None
    ) -> EmbeddingQuality:
        """Return the quality of the teacher with some weights replaced."""
        for name, parameter in self._model.named_parameters():
            parameter.data = weights.get(name, self._dense[name]).float()
        cosine = (self._embed() * self._reference).sum(1).double()
        tokens = sum(int(batch["attention_mask"].sum()) for batch in self._batches)
        distance = max(float((1 - cosine).mean()), 0.0)
        return EmbeddingQuality(tokens, distance, (2 * distance) ** 0.5)

    @torch.inference_mode()
    def _embed(self) -> Tensor:
        found = []
        for batch in self._batches:
            mask = batch["attention_mask"][..., None].float()
            hidden = self._model(**batch).last_hidden_state
            found.append(((hidden * mask).sum(1) / mask.sum(1)).double())
        return torch.nn.functional.normalize(torch.cat(found), dim=1)


class Evaluator:
    """A causal language model and its predictions."""

    def __init__(self, teacher: Path, text: Path, cache: Path, sequences: int = SEQUENCES) -> None:
        self._model = AutoModelForCausalLM.from_pretrained(teacher, dtype=torch.float32).eval()
        self._model.requires_grad_(requires_grad=False)
        self._dense = {name: x.clone() for name, x in self._model.named_parameters()}
        tokens = read_tokens(teacher, text)
        self._tokens = tokens[: sequences * LENGTH].view(sequences, LENGTH)
        self._cache = cache
        cache.mkdir(parents=True, exist_ok=True)
        self._reference = self._remember_teacher()

    @property
    def parameters(self) -> int:
        return sum(x.numel() for x in self._dense.values())

    def evaluate(self, weights: Mapping[str, Tensor], sequences: int | None = None) -> Quality:
        """Return the quality of the teacher with some weights replaced."""
        unknown = weights.keys() - self._dense.keys()
        if unknown:
            raise ValueError(f"not in the teacher: {sorted(unknown)[:3]}")
        count = min(sequences or len(self._tokens), len(self._tokens))
        path = self._cache / f"{self._digest(weights)}.json"
        done: list[list[float]] = json.loads(path.read_text()) if path.exists() else []
        if len(done) < count:
            for name, parameter in self._model.named_parameters():
                parameter.data = weights.get(name, self._dense[name]).float()
            for i in range(len(done), count):
                done.append(self._compare(i))
                path.write_text(json.dumps(done))
        return summarize(done[:count])

    @torch.inference_mode()
    def _compare(self, i: int) -> list[float]:
        """Return sums over a sequence: divergence, negative log-likelihood, agreements, tokens."""
        ours = torch.log_softmax(self._model(self._tokens[i : i + 1]).logits[0], -1)
        theirs = torch.from_numpy(self._reference[i].astype(np.float32))
        kl = (theirs.exp() * (theirs - ours)).sum()
        likelihood = ours[:-1].gather(1, self._tokens[i, 1:, None]).sum()
        same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        return [float(kl), -float(likelihood), float(same), LENGTH]

    @torch.inference_mode()
    def _remember_teacher(self) -> np.ndarray:
        """Return the teacher's log-probabilities from a file, which is written if missing."""
        key = self._digest({})
        vocabulary = self._model.config.vocab_size
        shape, path = (len(self._tokens), LENGTH, vocabulary), self._cache / f"teacher-{key}.npy"
        if not path.exists():
            part = path.with_suffix(".part")
            file = np.lib.format.open_memmap(part, mode="w+", dtype=np.float16, shape=shape)
            for i, row in enumerate(self._tokens):
                file[i] = torch.log_softmax(self._model(row[None]).logits[0], -1).numpy()
            file.flush()
            part.rename(path)
        return np.load(path, mmap_mode="r")

    def _digest(self, weights: Mapping[str, Tensor]) -> str:
        """Return a hash of the tokens, of the teacher and of the replaced weights."""
        found = hashlib.blake2b(self._tokens.numpy().tobytes(), digest_size=12)
        for name, weight in self._dense.items():
            x = weights.get(name, weight).float().contiguous()
            found.update(name.encode() + x.numpy().tobytes())
        return found.hexdigest()


def summarize(rows: list[list[float]]) -> Quality:
    """Return the means of sums over sequences."""
    kl, nll, same, tokens = (sum(column) for column in zip(*rows, strict=True))
    means = torch.tensor([row[0] / row[3] for row in rows])
    error = float(means.std() / len(rows) ** 0.5) if len(rows) > 1 else float("nan")
    predicted = tokens - len(rows)  # the first token of a sequence is not predicted
    perplexity = float(np.exp(nll / predicted))
    return Quality(int(tokens), kl / tokens, error, perplexity, same / tokens, rows)


def read_tokens(folder: Path, text: Path) -> Tensor:
    """Return a text as tokens of a model, without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    found = tokenizer(text.read_text(), add_special_tokens=False, return_tensors="pt")
    tokens: Tensor = found.input_ids[0]
    return tokens
