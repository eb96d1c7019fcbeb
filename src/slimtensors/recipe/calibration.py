"""Calibration data: texts, tables or tokens as batches."""

import csv
import inspect
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.storage import StrPath

Batch = Any
"""Arguments of one call of the model."""
Row = Mapping[str, Any]
Tokens = list[int]
Sample = dict[str, Tensor]
"""Arguments of the model for one sample, without the batch dimension."""

_IDS, _MASK, _LABELS = "input_ids", "attention_mask", "labels"
_DECODER_IDS = "decoder_input_ids"
_MEDIA = {"pixel_values": 3, "pixel_values_videos": 4, "input_features": 2, "input_values": 1}
"""Dimensions of one sample of images, videos, spectrograms and waves."""
_TEXT_COLUMNS = ("text", "content", "sentence", "prompt")
"""Names of a text column, in order of preference, if none is given."""
_PIECE = 20_000
"""Characters per piece into which texts are cut, so that samples cover all of a long text."""


@dataclass(frozen=True)
class Calibration:
    """Amount of calibration data, and how it is made from texts.

    Example:
        >>> oneshot(model, recipe, texts, calibration=Calibration(samples=256, length=2048))
    """

    samples: int = 128
    length: int = 512
    """Tokens per sample."""
    batch_size: int = 8
    seed: int = 0
    """Seed of the selection if there are more texts than needed."""
    pack: bool = True
    """Whether texts are concatenated and cut into samples of equal length; otherwise each text is
    one sample."""
    column: str | None = None
    """Text column of a table."""
    evaluate: Any = None
    """Dataset on which the model is measured before and after."""
    work: StrPath | None = None
    """Folder for finished layers, from which an interrupted run resumes."""

    def __post_init__(self) -> None:
        for name in ("samples", "length", "batch_size"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ConfigError(f"{name} must be a positive integer, got {value!r}")


def batches_for(
    model: Any, dataset: Any, calibration: Calibration, *, tokenizer: Any
) -> tuple[list[Batch], list[str]]:
    """Return batches of a dataset for a model, and notes on deviations from the request.

    An encoder-decoder model receives the labels of a table, or decodes the text that it encodes.
    """
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    has_decoder = takes_decoder_inputs(model)
    batches, notes = Data.of(dataset).batches(
        calibration, tokenizer=tokenizer, longest=longest, has_labels=has_decoder
    )
    if has_decoder and any(_lacks_decoder_inputs(batch) for batch in batches):
        batches = [_add_decoder_inputs(model, batch) for batch in batches]
        notes.append(f"no labels or {_DECODER_IDS}: the decoder runs on the {_IDS} of the encoder")
    return batches, notes


def takes_decoder_inputs(model: Any) -> bool:
    """Return True if a model has an encoder and a decoder with inputs of its own."""
    is_encoder_decoder = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return bool(is_encoder_decoder) and (
        _DECODER_IDS in inspect.signature(model.forward).parameters
    )


def _lacks_decoder_inputs(batch: Batch) -> bool:
    """Return True if a batch has tokens, but none for the decoder."""
    if not isinstance(batch, Mapping) or _IDS not in batch:
        return False
    return _LABELS not in batch and not any(str(name).startswith("decoder_") for name in batch)


def _add_decoder_inputs(model: Any, batch: Batch) -> Batch:
    """Return a batch whose tokens are also those of the decoder.

    The model shifts labels itself; for one without labels, they are shifted by a start token.
    """
    if not _lacks_decoder_inputs(batch):
        return batch
    if _LABELS in inspect.signature(model.forward).parameters:
        return {**batch, _LABELS: batch[_IDS]}
    shifted = batch[_IDS].roll(1, -1)
    shifted[..., 0] = _find_start_token(model.config)
    return {**batch, _DECODER_IDS: shifted}


def _find_start_token(config: Any) -> int:
    """Return the token with which a decoder starts."""
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")
    found = (getattr(config, name, None) for name in names)
    return next((token for token in found if isinstance(token, int)), 0)


@dataclass(frozen=True)
class Data:
    """An open dataset: an iterable of its items, and the first of them for inspection."""

    items: Iterable[Any]
    first: Any

    @classmethod
    def of(cls, dataset: Any) -> "Data":
        """Open texts, the path of a file, a table, a DataLoader, or a list of batches."""
        if isinstance(dataset, cls):
            return dataset
        items = read_texts(dataset) if isinstance(dataset, str | PathLike) else dataset
        if isinstance(columns := getattr(items, "column_names", None), Mapping):
            raise ConfigError(
                f"the dataset has several splits; pass dataset[{next(iter(columns))!r}]"
            )
        if isinstance(items, Mapping):
            raise ConfigError(
                f"expected a list of batches, got one batch of {', '.join(map(str, items))}"
            )
        if not isinstance(items, Iterable):
            raise ConfigError(f"{type(items).__name__} is not a dataset: it is not iterable")
        iterator = iter(items)
        head = list(islice(iterator, 1))
        if not head:
            raise ConfigError("the calibration data is empty")
        return cls(chain(head, iterator), head[0])

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer is required."""
        is_table = isinstance(self.first, Mapping) and not self.is_ready
        has_text = is_table and _IDS not in self.first and not _find_media(self.first)
        return isinstance(self.first, str) or has_text

    @property
    def is_ready(self) -> bool:
        """Whether items are batches, not samples."""
        if isinstance(self.first, Mapping):
            has_rows = any(isinstance(x, Tensor) and x.dim() > 1 for x in self.first.values())
            return has_rows and not _find_media(self.first)
        return not isinstance(self.first, str) and not _is_sample(self.first)

    def batches(
        self,
        calibration: Calibration,
        *,
        tokenizer: Any = None,
        longest: int | None = None,
        has_labels: bool = False,
    ) -> tuple[list[Batch], list[str]]:
        """Return batches, and notes on deviations from the request.

        `longest` is the maximum number of tokens of the model, and `has_labels` whether it runs on
        the labels of a table. Data without any token raises.
        """
        notes: list[str] = []
        length = min(calibration.length, longest or calibration.length)
        if self.is_ready:
            batches, count = _take_batches(self.items, calibration.samples)
        else:
            columns = self._find_columns(has_labels=has_labels)
            samples = self._make_samples(calibration, tokenizer, length, columns)
            if not samples:
                raise ConfigError("the calibration data contains no tokens")
            batches, count = _group_samples(samples, calibration.batch_size), len(samples)
            notes += self._note_unused_columns(columns)
            if calibration.pack and _IDS in columns:
                lengths = [len(sample[_IDS]) for sample in samples]
                notes += _note_lengths(lengths, calibration.length, length)
        if count < calibration.samples:
            notes.append(f"{count} samples of calibration data, not {calibration.samples}")
        return batches, notes

    def _find_columns(self, *, has_labels: bool) -> list[str]:
        """Return the columns that the samples will have."""
        if self.is_text or not isinstance(self.first, Mapping):
            return [_IDS]
        wanted = [_IDS, *_find_media(self.first), *([_LABELS] if has_labels else [])]
        return [name for name in wanted if name in self.first]

    def _note_unused_columns(self, columns: Sequence[str]) -> list[str]:
        if self.is_text or not isinstance(self.first, Mapping):
            return []
        names = sorted({*map(str, self.first)} - {*columns, _MASK})
        used = f"{' and '.join(columns)} of the table {'is' if len(columns) == 1 else 'are'} used"
        return [f"only {used}, not {', '.join(names)}"] if names else []

    def _make_samples(
        self, calibration: Calibration, tokenizer: Any, length: int, columns: Sequence[str]
    ) -> list[Sample]:
        if not self.is_text:
            rows = (_read_row(row, columns, length) for row in self.items)
            return list(islice((row for row in rows if row), calibration.samples))
        if tokenizer is None:
            raise ConfigError(
                "texts need a tokenizer, and the model folder has none: pass tokenizer=..."
            )
        pieces = list(extract_texts(self.items, column=calibration.column))
        if calibration.pack:
            pieces = [x[i : i + _PIECE] for x in pieces for i in range(0, len(x), _PIECE)]
        random.Random(calibration.seed).shuffle(pieces)
        tokens = (
            list(tokenizer(x, truncation=False, verbose=False)[_IDS]) for x in pieces if x.strip()
        )
        if calibration.pack:
            samples = _pack_tokens(tokens, calibration.samples, length)
        else:
            samples = list(islice((each[:length] for each in tokens if each), calibration.samples))
        return [{_IDS: torch.tensor(sample)} for sample in samples]


def read_texts(path: StrPath) -> Iterator[str | Row]:
    """Yield the rows of a jsonl, csv or tsv file, or the whole text of any other text file."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: file not found; pass texts as a list")
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            yield from _read_json_lines(file)
        case ".csv" | ".tsv":
            with file.open(encoding="utf-8", newline="") as lines:
                yield from csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        case ".json":
            raise ConfigError(f"{path}: expected .jsonl, with one text or row per line")
        case _:
            text = file.read_text(encoding="utf-8", errors="replace")
            if "\0" in text:
                raise ConfigError(f"{path}: not a text file; expected .txt, .jsonl or .csv")
            if not text.strip():
                raise ConfigError(f"{path}: the file is empty")
            yield text


def extract_texts(items: Iterable[str | Row], *, column: str | None = None) -> Iterator[str]:
    """Yield texts, and the text column of table rows."""
    for item in items:
        if isinstance(item, str):
            yield item
            continue
        column = column or _find_text_column(item)
        if not isinstance(text := item.get(column), str):
            raise ConfigError(
                f"column {column!r} contains {type(text).__name__}, not text;"
                f" columns are {', '.join(map(str, item))}"
            )
        yield text


def _read_json_lines(path: Path) -> Iterator[str | Row]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}: line {number} is not valid JSON: {error}") from error
            if not isinstance(row, str | dict):
                raise ConfigError(f"{path}: line {number} must be a string or an object")
            yield row


def _find_text_column(row: Row) -> str:
    texts = [name for name, value in row.items() if isinstance(value, str)]
    found = [name for name in _TEXT_COLUMNS if name in texts] or (texts if len(texts) == 1 else [])
    if not found:
        raise ConfigError(
            f"cannot choose a text column from {', '.join(map(str, row))};"
            " pass Calibration(column=...)"
        )
    return found[0]


def _is_sample(item: Any) -> bool:
    """Return True if an item is the tokens of one sample: a list or vector of integers."""
    if isinstance(item, Tensor):
        return item.dim() == 1 and not item.is_floating_point()
    return isinstance(item, Sequence) and bool(item) and all(isinstance(x, int) for x in item)


def _find_media(row: Row) -> list[str]:
    """Return the columns of a row that contain one image, video or sound, not a batch of them."""
    return [name for name, dims in _MEDIA.items() if name in row and _count_dims(row[name]) == dims]


def _count_dims(value: Any) -> int:
    """Return the number of dimensions of a tensor, an array, or nested lists."""
    if hasattr(value, "ndim"):
        return int(value.ndim)
    return 1 + _count_dims(value[0]) if isinstance(value, Sequence) and len(value) else 0


def _read_row(row: Any, columns: Sequence[str], length: int) -> Sample:
    """Return the sample of a row, with at most `length` tokens; empty if it has no token."""
    if not isinstance(row, Mapping):
        row = {_IDS: row}
    sample = {name: _read_column(row, name) for name in columns}
    if _IDS not in sample:
        return sample
    ids = sample[_IDS]
    if ids.dim() != 1:
        raise ConfigError(f"{_IDS} of a row must be a list of tokens, got shape {[*ids.shape]}")
    if row.get(_MASK) is not None:
        mask = _read_column(row, _MASK)
        if mask.shape != ids.shape:
            raise ConfigError(f"a row has {len(ids)} {_IDS}, but {_MASK} of shape {[*mask.shape]}")
        ids = ids[mask.bool()]
    return sample | {_IDS: ids[:length]} if len(ids) else {}


def _read_column(row: Row, name: str) -> Tensor:
    if name not in row:
        raise ConfigError(f"a row has no {name}, unlike the first one")
    try:
        return torch.as_tensor(row[name])
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"{name} of a row must be numbers: {error}") from error


def _note_lengths(lengths: Sequence[int], requested: int, possible: int) -> list[str]:
    """Return a note if samples are shorter than requested."""
    shortest, longest = min(lengths), max(lengths)
    if shortest >= requested:
        return []
    if shortest < longest:
        return [f"the shortest sample has {shortest} tokens, not {requested}"]
    reason = "not enough data" if shortest < possible else "the limit of the model"
    return [f"samples of {shortest} tokens, not {requested}: {reason}"]


def _pack_tokens(tokens: Iterable[Tokens], samples: int, length: int) -> list[Tokens]:
    stream: Tokens = []
    for each in tokens:
        stream += each
        if len(stream) >= samples * length:
            break
    whole = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
    return whole[:samples] or ([stream] if stream else [])


def _group_samples(samples: Sequence[Sample], size: int) -> list[Batch]:
    """Return batches of samples of equal shapes, which need no padding."""
    by_shape: dict[Any, list[Sample]] = {}
    for sample in samples:
        by_shape.setdefault(tuple(x.shape for x in sample.values()), []).append(sample)
    return [
        {name: torch.stack([sample[name] for sample in group[i : i + size]]) for name in group[0]}
        for group in by_shape.values()
        for i in range(0, len(group), size)
    ]


def _take_batches(items: Iterable[Batch], samples: int) -> tuple[list[Batch], int]:
    """Return batches with at least this many samples if possible, and their number."""
    batches: list[Batch] = []
    count = 0
    for batch in items:
        batches.append(batch)
        count += _count_samples(batch)
        if count >= samples:
            break
    return batches, count


def _count_samples(batch: Batch) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [batch] if isinstance(batch, Tensor) else values
    try:
        return next(len(x) for x in tensors if isinstance(x, Tensor) and x.dim())
    except (StopIteration, TypeError):
        raise ConfigError(f"a batch contains no tensor: {type(batch).__name__}") from None


__all__ = ["Batch", "Calibration", "Data", "batches_for"]
