"""Datasets: tokenized examples, texts and files that are tokenized here, generated texts."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler
from transformers import (
    DataCollatorForSeq2Seq,
    DataCollatorWithPadding,
    GenerationConfig,
    default_data_collator,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from slimtensors.errors import ConfigError
from slimtensors.layerwise.inputs import MASK, remove_padding
from slimtensors.layerwise.passes import without_dropout
from slimtensors.recipe.calibration import (
    Batch,
    Calibration,
    Row,
    extract_texts,
    read_texts,
    takes_decoder_inputs,
)

_IGNORED_LABEL = -100
"""Label of tokens that the loss ignores."""
_CALIBRATION_SAMPLES, _CALIBRATION_BATCH = 128, 8
"""Amount of data for modifiers that need data but no training."""
_GENERATED_ROWS = 32
"""Texts that are generated at once."""


@dataclass(frozen=True)
class Examples:
    """A dataset for the Trainer, with the settings of the DataLoader that it came from."""

    rows: Any
    collate: Callable[[list[Any]], Any] | None = None
    batch_size: int | None = None
    sampling: str | None = None


def load_examples(dataset: Any, model: Any, tokenizer: Any) -> Examples:
    """Return the examples of a dataset, a DataLoader, texts, or a file; raise if it is empty.

    Files are `.txt` (one text per line), `.jsonl` and `.csv` (with `text`, and `label` for
    classifiers).
    """
    if isinstance(dataset, DataLoader):
        examples = _unwrap_loader(dataset)
    elif isinstance(dataset, str | Path):
        examples = _tokenize(_read_rows(Path(dataset)), model, tokenizer)
    elif _contains_texts(dataset):
        rows = [{"text": row} if isinstance(row, str) else row for row in dataset]
        examples = _tokenize(rows, model, tokenizer)
    else:
        examples = Examples(dataset)
    if hasattr(examples.rows, "__len__") and not len(examples.rows):
        raise ConfigError(f"the dataset is empty: {dataset!r}")
    return examples


def calibration_batches(data: Examples, model: nn.Module, tokenizer: Any) -> list[Any]:
    """Return the first examples as batches for one-shot modifiers, on the device of the model.

    Columns that the model does not accept are removed, labels unless a decoder runs on them, and
    padding, whether or not the model accepts an attention mask.
    """
    has_decoder = takes_decoder_inputs(model)
    pad: Callable[[list[Any]], Any] = default_data_collator
    if tokenizer:
        kind = DataCollatorForSeq2Seq if has_decoder else DataCollatorWithPadding
        pad = kind(tokenizer)

    def select_inputs(row: Any) -> Any:
        columns = select_columns(model, row)
        return {name: x for name, x in columns.items() if name != "labels" or has_decoder}

    def select_masked(row: Any) -> Any:
        return select_inputs(row) | ({MASK: row[MASK]} if MASK in row else {})

    def collate(rows: list[Any]) -> Any:
        return data.collate(rows) if data.collate else pad([select_masked(x) for x in rows])

    loader = DataLoader(data.rows, batch_size=_CALIBRATION_BATCH, collate_fn=collate)
    batches = islice(loader, _CALIBRATION_SAMPLES // _CALIBRATION_BATCH)
    device = next(model.parameters()).device
    return [
        {name: x.to(device) for name, x in select_inputs(batch).items()}
        for batch in remove_padding(model, batches)
    ]


def select_columns(model: nn.Module, row: Any) -> Any:
    """Return the columns of a row or batch that the model accepts; raise if there are none."""
    unused = find_unused_columns(model, row)
    if not unused:
        return row
    if len(unused) == len(row):
        accepted = ", ".join(_list_arguments(model)[:4])
        columns = ", ".join(map(str, row))
        raise ConfigError(
            f"{type(model).__name__} accepts {accepted}, ...; the data has only {columns}"
        )
    return {name: x for name, x in row.items() if name not in unused}


def find_unused_columns(model: nn.Module, row: Any) -> set[str]:
    """Return the columns of a row or batch that are not arguments of the model.

    A model without named arguments accepts all. Otherwise `**kwargs` do not count: they are
    settings for its layers, not data.
    """
    if not isinstance(row, Mapping):
        return set()
    arguments = _list_arguments(model)
    return {*row} - {*arguments} if arguments else set()


def _list_arguments(model: nn.Module) -> list[str]:
    """Return the argument names of a model, without `*args` and `**kwargs`."""
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]


def _contains_texts(dataset: Any) -> bool:
    """Return True for a sequence of texts, or of rows with a text that is not tokenized."""
    if not hasattr(dataset, "__len__") or not len(dataset):
        return False
    first = dataset[0]
    is_row = isinstance(first, Mapping) and "input_ids" not in first
    return isinstance(first, str) or (is_row and isinstance(first.get("text"), str))


def _unwrap_loader(loader: DataLoader[Any]) -> Examples:
    known = {RandomSampler: "random", SequentialSampler: "sequential"}
    sampling = known.get(type(loader.sampler))
    if sampling is None or loader.batch_size is None or loader.drop_last:
        raise ConfigError(
            "a DataLoader with a custom sampler or drop_last cannot be resumed; pass its dataset"
        )
    return Examples(loader.dataset, loader.collate_fn, loader.batch_size, sampling)


def _read_rows(path: Path) -> list[Row]:
    """Return the rows of a table, or one row per line of a text file."""
    rows: list[Row] = []
    for item in read_texts(path):
        lines = item.splitlines() if isinstance(item, str) else [item]
        rows += [{"text": x} if isinstance(x, str) else x for x in lines if x]
    texts = extract_texts(rows)
    return [{**row, "text": text} for row, text in zip(rows, texts, strict=True)]


def _tokenize(rows: Sequence[Row], model: Any, tokenizer: Any) -> Examples:
    if tokenizer is None:
        raise ConfigError("texts need a tokenizer, and the model has none: pass tokenizer=...")
    kind = type(model).__name__
    is_causal = kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    if not is_causal and any("label" not in row for row in rows):
        raise ConfigError(f"{kind} needs a 'label' for each text, or examples with 'labels'")
    label_ids = model.config.label2id
    labels = None if is_causal else [_parse_label(row["label"], label_ids) for row in rows]
    longest = min(tokenizer.model_max_length, getattr(model.config, "max_position_embeddings", 512))
    return Examples(
        TokenizedTexts([row["text"] for row in rows], labels, tokenizer, longest),
        PaddingCollator(tokenizer.pad_token_id or 0),
    )


def _parse_label(label: Any, label_ids: Mapping[str, int]) -> int:
    if label in label_ids:
        return label_ids[label]
    try:
        return int(label)
    except ValueError:
        raise ConfigError(
            f"unknown label {label!r}; the model has {', '.join(label_ids)}"
        ) from None


@dataclass(frozen=True)
class TokenizedTexts(Dataset[dict[str, Any]]):
    """Texts, tokenized on access; without labels, the tokens are the labels."""

    texts: Sequence[str]
    labels: Sequence[int] | None
    tokenizer: Any
    longest: int

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        encoded = self.tokenizer(self.texts[index], truncation=True, max_length=self.longest)
        tokens = encoded["input_ids"]
        return {"input_ids": tokens, "labels": self.labels[index] if self.labels else tokens}


@dataclass(frozen=True)
class PaddingCollator:
    """Collate rows of different lengths into a padded batch."""

    token: int
    """Token id of the padding."""

    def __call__(self, rows: Sequence[Row]) -> dict[str, Tensor]:
        """Return token ids, attention mask and labels."""
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        ones = [torch.ones_like(x) for x in ids]
        labels = [torch.tensor(row["labels"]) for row in rows]
        return {
            "input_ids": _pad(ids, self.token),
            MASK: _pad(ones, 0),
            "labels": _pad(labels, _IGNORED_LABEL) if labels[0].dim() else torch.stack(labels),
        }


def _pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def find_generation_obstacle(model: Any) -> str | None:
    """Return why a model cannot generate text, or None if it can."""
    is_text = getattr(model, "main_input_name", None) == "input_ids"
    is_decoder = not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not hasattr(model, "generate") or not model.can_generate() or not is_text or not is_decoder:
        return f"{type(model).__name__} cannot generate text for calibration"
    if _find_start(model) is None:
        return "the model has no start token to generate text from"
    return None


@torch.no_grad()
def generate_batches(
    model: Any, settings: Calibration, progress: Callable[[int, int], object]
) -> list[Batch]:
    """Return batches of tokens that the model generates itself, from its start token."""
    start = _find_start(model)
    assert start is not None, "checked by the caller"
    longest = getattr(model.config, "max_position_embeddings", None) or settings.length
    length = max(min(settings.length, longest), 2)
    sampling = GenerationConfig(  # not that of the model: samples of its own distribution
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_new_tokens=length - 1,
        max_new_tokens=length - 1,
        bos_token_id=start,
        eos_token_id=model.generation_config.eos_token_id,
        pad_token_id=start,
    )
    batches: list[Batch] = []
    with without_dropout(model), torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        for done in range(0, settings.samples, _GENERATED_ROWS):
            count = min(_GENERATED_ROWS, settings.samples - done)
            ids = model.generate(
                torch.full((count, 1), start),
                attention_mask=torch.ones(count, 1, dtype=torch.long),
                generation_config=sampling,
            )
            progress(done + count, settings.samples)
            size = settings.batch_size
            batches += [{"input_ids": ids[i : i + size]} for i in range(0, len(ids), size)]
    return batches


def _find_start(model: Any) -> int | None:
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        token = getattr(model.generation_config, name, None)
        token = token[0] if isinstance(token, list) else token
        if isinstance(token, int):
            return token
    return None
