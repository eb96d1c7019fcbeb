"""Calibration data: texts, tables or tokens as batches."""

import csv
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

_IDS, _MASK = "input_ids", "attention_mask"
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
    """Return batches of a dataset for a model, and notes on deviations from the request."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return Data.of(dataset).batches(calibration, tokenizer=tokenizer, longest=longest)


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
        return isinstance(self.first, str) or (is_table and _IDS not in self.first)

    @property
    def is_ready(self) -> bool:
        """Whether items are batches, not samples."""
        if isinstance(self.first, Mapping):
            return any(isinstance(x, Tensor) and x.dim() > 1 for x in self.first.values())
        return not isinstance(self.first, str) and not _is_sample(self.first)

    def batches(
        self, calibration: Calibration, *, tokenizer: Any = None, longest: int | None = None
    ) -> tuple[list[Batch], list[str]]:
        """Return batches, and notes on deviations from the request.

        `longest` is the maximum number of tokens of the model. Data without any token raises.
        """
        notes: list[str] = []
        length = min(calibration.length, longest or calibration.length)
        if self.is_ready:
            batches, count = _take_batches(self.items, calibration.samples)
        else:
            samples = self._make_samples(calibration, tokenizer, length)
            if not samples:
                raise ConfigError("the calibration data contains no tokens")
            batches, count = _group_samples(samples, calibration.batch_size), len(samples)
            notes += self._note_unused_columns()
            notes += _note_lengths(samples, calibration.length, length) if calibration.pack else []
        if count < calibration.samples:
            notes.append(f"{count} samples of calibration data, not {calibration.samples}")
        return batches, notes

    def _note_unused_columns(self) -> list[str]:
        if self.is_text or not isinstance(self.first, Mapping):
            return []
        names = sorted({*map(str, self.first)} - {_IDS, _MASK})
        return [f"only {_IDS} of the table is used, not {', '.join(names)}"] if names else []

    def _make_samples(self, calibration: Calibration, tokenizer: Any, length: int) -> list[Tokens]:
        if not self.is_text:
            rows = (_extract_tokens(row)[:length] for row in self.items)
            return list(islice(filter(None, rows), calibration.samples))
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
            return _pack_tokens(tokens, calibration.samples, length)
        return list(islice((each[:length] for each in tokens if each), calibration.samples))


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


def _extract_tokens(row: Any) -> Tokens:
    """Return the tokens of a row, without padding."""
    columns = row if isinstance(row, Mapping) else {_IDS: row}
    ids = torch.as_tensor(columns[_IDS])
    if ids.dim() != 1:
        raise ConfigError(f"{_IDS} of a row must be a list of tokens, got shape {[*ids.shape]}")
    if (mask := columns.get(_MASK)) is not None:
        ids = ids[torch.as_tensor(mask).bool()]
    tokens: Tokens = ids.tolist()
    return tokens


def _note_lengths(samples: Sequence[Tokens], requested: int, possible: int) -> list[str]:
    """Return a note if samples are shorter than requested."""
    shortest, longest = min(map(len, samples)), max(map(len, samples))
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


def _group_samples(samples: Sequence[Tokens], size: int) -> list[Batch]:
    """Return batches of samples of equal length, which need no padding."""
    by_length: dict[int, list[Tokens]] = {}
    for sample in samples:
        by_length.setdefault(len(sample), []).append(sample)
    return [
        {_IDS: torch.tensor(group[i : i + size])}
        for group in by_length.values()
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
