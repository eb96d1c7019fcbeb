"""What a model is trained on: examples, or text that a tokenizer makes examples of."""

import csv
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slimtensors.errors import ConfigError

Row = Mapping[str, Any]
_IGNORED = -100
"""The label of a token that no model is asked about."""
_FILES = {".txt", ".jsonl", ".csv"}


@dataclass(frozen=True)
class Examples:
    """What the Trainer is given."""

    rows: Any
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int | None = None
    sampling: str | None = None
    """Where a DataLoader says these, they are as it says."""


def examples(given: Any, model: Any, tokenizer: Any) -> Examples:
    """Return examples of a dataset, a DataLoader, texts, or a file of them; raise if it is empty.

    Files are `.txt` (a text per line), `.jsonl` and `.csv` (with `text`, and `label` where the
    model classifies).
    """
    if isinstance(given, DataLoader):
        found = _loaded(given)
    elif isinstance(given, str | Path):
        found = _texts(_read(Path(given)), model, tokenizer)
    elif isinstance(given, Sequence) and given and isinstance(given[0], str):
        found = _texts([{"text": text} for text in given], model, tokenizer)
    else:
        found = Examples(given)
    if hasattr(found.rows, "__len__") and not len(found.rows):
        raise ConfigError(f"the dataset is empty: {given!r}")
    return found


def _loaded(loader: DataLoader[Any]) -> Examples:
    known = {RandomSampler: "random", SequentialSampler: "sequential"}
    sampling = known.get(type(loader.sampler))
    if sampling is None or loader.batch_size is None or loader.drop_last:
        raise ConfigError(
            "a DataLoader with its own sampler or drop_last cannot be resumed; pass its dataset"
        )
    return Examples(loader.dataset, loader.collate_fn, loader.batch_size, sampling)


def _read(path: Path) -> list[Row]:
    if path.suffix not in _FILES:
        raise ConfigError(f"{path}: a dataset is a file of {', '.join(sorted(_FILES))}")
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; datasets are local")
    with path.open(encoding="utf-8", newline="") as lines:
        rows = list(_rows(path, lines))
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or not isinstance(row.get("text"), str):
            raise ConfigError(f"{path}: row {number} has no 'text'")
    return rows


def _rows(path: Path, lines: Iterable[str]) -> Iterable[Row]:
    if path.suffix == ".csv":
        return csv.DictReader(lines)
    texts = [line.strip() for line in lines if line.strip()]
    if path.suffix == ".txt":
        return [{"text": text} for text in texts]
    try:
        return [json.loads(text) for text in texts]
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON, line by line: {error}") from error


def _texts(rows: Sequence[Row], model: Any, tokenizer: Any) -> Examples:
    if tokenizer is None:
        raise ConfigError("text needs a tokenizer, and the model brings none: pass tokenizer=...")
    kind = type(model).__name__
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not is_causal and any("label" not in row for row in rows):
        raise ConfigError(f"{kind}: needs a 'label' with each text, or examples with 'labels'")
    labels = None if is_causal else [_label(row["label"], model.config.label2id) for row in rows]
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
    return Examples(
        TokenizedTexts([row["text"] for row in rows], labels, tokenizer, longest),
        Padding(tokenizer.pad_token_id or 0),
    )


def _label(given: Any, known: Mapping[str, int]) -> int:
    if given in known:
        return known[given]
    try:
        return int(given)
    except ValueError:
        listed = ", ".join(known)
        raise ConfigError(f"label {given!r} is none of the model's: {listed}") from None


@dataclass(frozen=True)
class TokenizedTexts(Dataset[dict[str, Any]]):
    """Texts as token ids; labels are those given, or the tokens themselves."""

    texts: Sequence[str]
    labels: Sequence[int] | None
    tokenizer: Any
    longest: int

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = self.tokenizer(self.texts[index], truncation=True, max_length=self.longest)
        tokens = ids["input_ids"]
        return {"input_ids": tokens, "labels": self.labels[index] if self.labels else tokens}


@dataclass(frozen=True)
class Padding:
    """Makes a batch of rows of different lengths."""

    token: int

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return ids, the attention that leaves padding out, and labels."""
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        ones = [torch.ones_like(x) for x in ids]
        labels = [torch.tensor(row["labels"]) for row in rows]
        return {
            "input_ids": self._padded(ids, self.token),
            "attention_mask": self._padded(ones, 0),
            "labels": self._padded(labels, _IGNORED) if labels[0].dim() else torch.stack(labels),
        }

    @staticmethod
    def _padded(rows: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
