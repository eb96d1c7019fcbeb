"""What a model is trained on: examples, or text that a tokenizer makes examples of."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers import DataCollatorWithPadding, default_data_collator
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slimtensors.errors import ConfigError
from slimtensors.layerwise.inputs import MASK, remove_padding
from slimtensors.recipe.calibration import Row, extract_texts, read_texts


def columns_for(model: nn.Module, row: Any) -> Any:
    """Return what of a row or a batch the model can be called with; raise if that is nothing."""
    unused = unused_columns(model, row)
    if not unused:
        return row
    if len(unused) == len(row):
        kind, names = type(model).__name__, list(_arguments(model))[:4]
        have = ", ".join(map(str, row))
        raise ConfigError(f"{kind} takes {', '.join(names)}, ...; the data has {have}")
    return {name: x for name, x in row.items() if name not in unused}


def unused_columns(model: nn.Module, row: Any) -> set[str]:
    """Return the names in a row or a batch that are no arguments of the model.

    A model that names none takes whatever comes. One that names some takes those only: its
    `**kwargs` are settings for its layers, and no data.
    """
    if not isinstance(row, Mapping):
        return set()
    known = _arguments(model)
    return {*row} - {*known} if known else set()


def _arguments(model: nn.Module) -> list[str]:
    """Return the arguments that a model names, without `*args` and `**kwargs`."""
    return [
        name
        for name, each in inspect.signature(model.forward).parameters.items()
        if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)
    ]


_IGNORED = -100
"""The label of a token that no model is asked about."""
_SAMPLES, _BATCH = 128, 8
"""How much of it modifiers see that need data but no training."""


@dataclass(frozen=True)
class Examples:
    """What the Trainer is given."""

    rows: Any
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int | None = None
    sampling: str | None = None
    """Where a DataLoader says these, they are as it says."""


def load_examples(given: Any, model: Any, tokenizer: Any) -> Examples:
    """Return examples of a dataset, a DataLoader, texts, or a file of them; raise if it is empty.

    Files are `.txt` (a text per line), `.jsonl` and `.csv` (with `text`, and `label` where the
    model classifies).
    """
    if isinstance(given, DataLoader):
        found = _loaded(given)
    elif isinstance(given, str | Path):
        found = _texts(_read(Path(given)), model, tokenizer)
    elif _holds_texts(given):
        rows = [{"text": row} if isinstance(row, str) else row for row in given]
        found = _texts(rows, model, tokenizer)
    else:
        found = Examples(given)
    if hasattr(found.rows, "__len__") and not len(found.rows):
        raise ConfigError(f"the dataset is empty: {given!r}")
    return found


def _holds_texts(given: Any) -> bool:
    """Tell whether there are texts, or rows with a text, that are not tokens yet."""
    if not hasattr(given, "__len__") or not len(given):
        return False
    first = given[0]
    is_row = isinstance(first, Mapping) and "input_ids" not in first
    return isinstance(first, str) or (is_row and isinstance(first.get("text"), str))


def calibration_batches(data: Examples, model: nn.Module, tokenizer: Any) -> list[Any]:
    """Return the first examples, without labels and what else the model is not to be called with.

    They are for modifiers that only look at them, and have no padding, whether or not the model
    takes the mask that tells it.
    """
    padded = DataCollatorWithPadding(tokenizer) if tokenizer else default_data_collator

    def inputs(row: Any) -> Any:
        return {name: x for name, x in columns_for(model, row).items() if name != "labels"}

    def masked(row: Any) -> Any:
        return inputs(row) | ({MASK: row[MASK]} if MASK in row else {})

    def batch(rows: list[Any]) -> Any:
        return data.collate(rows) if data.collate else padded([masked(x) for x in rows])

    loader = DataLoader(data.rows, batch_size=_BATCH, collate_fn=batch)
    device = next(model.parameters()).device
    return [
        {name: x.to(device) for name, x in inputs(found).items()}
        for found in remove_padding(model, islice(loader, _SAMPLES // _BATCH))
    ]


def _loaded(loader: DataLoader[Any]) -> Examples:
    known = {RandomSampler: "random", SequentialSampler: "sequential"}
    sampling = known.get(type(loader.sampler))
    if sampling is None or loader.batch_size is None or loader.drop_last:
        raise ConfigError(
            "a DataLoader with its own sampler or drop_last cannot be resumed; pass its dataset"
        )
    return Examples(loader.dataset, loader.collate_fn, loader.batch_size, sampling)


def _read(path: Path) -> list[Row]:
    """Return the rows of a file; of a plain text, its lines."""
    rows: list[Row] = []
    for found in read_texts(path):
        lines = found.splitlines() if isinstance(found, str) else [found]
        rows += [{"text": x} if isinstance(x, str) else x for x in lines if x]
    texts = extract_texts(rows)
    return [{**row, "text": text} for row, text in zip(rows, texts, strict=True)]


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
            MASK: self._padded(ones, 0),
            "labels": self._padded(labels, _IGNORED) if labels[0].dim() else torch.stack(labels),
        }

    @staticmethod
    def _padded(rows: list[Tensor], value: int) -> Tensor:
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
