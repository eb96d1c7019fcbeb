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

Row = Mapping[str, Any]

_COLUMNS = ("text", "content", "sentence", "prompt")
"""What a column of texts is called, where nobody says."""


def read_texts(path: StrPath) -> Iterator[str | Row]:
    """Yield the rows of a jsonl, csv or tsv file; of any other, all its text.

    What is not text, or is JSON in one piece, raises: its quotes and commas are nothing to learn.
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"{path}: there is no such file; texts are given as a list")
    match file.suffix.lower():
        case ".jsonl" | ".ndjson":
            yield from _json_rows(file)
        case ".csv" | ".tsv":
            with file.open(encoding="utf-8", newline="") as lines:
                yield from csv.DictReader(lines, delimiter="\t" if file.suffix == ".tsv" else ",")
        case ".json":
            raise ConfigError(f"{path}: write it as .jsonl, with one text or row in each line")
        case _:
            text = file.read_text(encoding="utf-8", errors="replace")
            if "\0" in text:
                raise ConfigError(f"{path}: is not a text file; write it as .txt, .jsonl or .csv")
            if not text.strip():
                raise ConfigError(f"{path}: is empty; calibration needs text")
            yield text


def extract_texts(items: Iterable[str | Row], *, column: str | None = None) -> Iterator[str]:
    """Yield texts, and of rows of a table those of one column."""
    for item in items:
        if isinstance(item, str):
            yield item
            continue
        column = column or _find_column(item)
        if not isinstance(text := item.get(column), str):
            raise ConfigError(
                f"column {column!r} holds {type(text).__name__}, not text;"
                f" there are {', '.join(map(str, item))}"
            )
        yield text


def _json_rows(path: Path) -> Iterator[str | Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{path}: line {number} is not JSON: {error}") from error
            if not isinstance(row, str | dict):
                raise ConfigError(f"{path}: line {number} is neither text nor a table")
            yield row


def _find_column(row: Row) -> str:
    texts = [name for name, value in row.items() if isinstance(value, str)]
    known = [name for name in _COLUMNS if name in texts] or (texts if len(texts) == 1 else [])
    if not known:
        names = ", ".join(map(str, row))
        raise ConfigError(
            f"which column is the text? there are {names}; call one of them text,"
            " or say Calibration(column=...)"
        )
    return known[0]


Batch = Any
"""What a model is called with."""
Tokens = list[int]

_IDS, _MASK = "input_ids", "attention_mask"
_PIECE = 20_000
"""Characters of a text that are taken together: of a long one, samples come from all over it."""


@dataclass(frozen=True)
class Calibration:
    """How much data a model is run on, and how it is made of texts."""

    samples: int = 128
    length: int = 512
    """Tokens per sample."""
    batch_size: int = 8
    seed: int = 0
    """Decides which texts are taken where there are more than enough."""
    pack: bool = True
    """Whether texts are put one after the other and cut into samples of equal length; else each is
    a sample of its own."""
    column: str | None = None
    """Which column of a table is the text."""
    evaluate: Any = None
    """Data, of any kind, to measure the model on before and after."""
    work: StrPath | None = None
    """A folder for finished layers, from which a run that was killed goes on."""

    def __post_init__(self) -> None:
        for name in ("samples", "length", "batch_size"):
            if not isinstance(value := getattr(self, name), int) or value < 1:
                raise ConfigError(f"{name} is a number from 1 on, not {value!r}")


@dataclass(frozen=True)
class Data:
    """A dataset as it was given, opened: its items, the first of which has been looked at."""

    items: Iterable[Any]
    first: Any

    @classmethod
    def of(cls, dataset: Any) -> "Data":
        """Open texts, the path of a file, a table, a DataLoader, or a list of batches.

        What is open stays as it is.
        """
        if isinstance(dataset, cls):
            return dataset
        items = read_texts(dataset) if isinstance(dataset, str | PathLike) else dataset
        if isinstance(columns := getattr(items, "column_names", None), Mapping):
            raise ConfigError(f"several datasets in one: choose dataset[{next(iter(columns))!r}]")
        if isinstance(items, Mapping):
            raise ConfigError(f"one batch alone, of {', '.join(map(str, items))}: put it in a list")
        if not isinstance(items, Iterable):
            raise ConfigError(f"{type(items).__name__} is no dataset: it cannot be gone through")
        rest = iter(items)
        head = list(islice(rest, 1))
        if not head:
            raise ConfigError("the calibration data is empty")
        return cls(chain(head, rest), head[0])

    @property
    def is_text(self) -> bool:
        """Whether a tokenizer is needed."""
        is_table = isinstance(self.first, Mapping) and not self.is_ready
        return isinstance(self.first, str) or (is_table and _IDS not in self.first)

    @property
    def is_ready(self) -> bool:
        """Whether items are batches that a model can be called with, not samples."""
        if isinstance(self.first, Mapping):
            return any(isinstance(x, Tensor) and x.dim() > 1 for x in self.first.values())
        return not isinstance(self.first, str) and not _is_sample(self.first)

    def batches(
        self, how: Calibration, *, tokenizer: Any = None, longest: int | None = None
    ) -> tuple[list[Batch], list[str]]:
        """Return batches, and what of them is not as asked for.

        `longest` is how many tokens the model can take. What has no text or token raises.
        """
        notes: list[str] = []
        length = min(how.length, longest or how.length)
        if self.is_ready:
            batches, count = _ready(self.items, how.samples)
        else:
            samples = self._samples(how, tokenizer, length)
            if not samples:
                raise ConfigError("the tokenizer finds no token in the calibration data")
            batches, count = _batched(samples, how.batch_size), len(samples)
            notes += self._unused()
            notes += _shortage(samples, how.length, length) if how.pack else []
        if count < how.samples:
            notes.append(f"{count} samples of calibration data, not {how.samples}")
        return batches, notes

    def _unused(self) -> list[str]:
        """Tell which columns of a table of tokens are not taken."""
        if self.is_text or not isinstance(self.first, Mapping):
            return []
        names = sorted({*map(str, self.first)} - {_IDS, _MASK})
        return (
            [f"of the table, only {_IDS} are taken: {', '.join(names)} left out"] if names else []
        )

    def _samples(self, how: Calibration, tokenizer: Any, length: int) -> list[Tokens]:
        if not self.is_text:
            rows = (_tokens(row)[:length] for row in self.items)
            return list(islice(filter(None, rows), how.samples))
        if tokenizer is None:
            raise ConfigError(
                "texts need a tokenizer, and there is none in the folder of the model:"
                " put it there, or pass tokenizer=..."
            )
        texts = extract_texts(self.items, column=how.column)
        pieces = list(texts)
        if how.pack:
            pieces = [x[i : i + _PIECE] for x in pieces for i in range(0, len(x), _PIECE)]
        random.Random(how.seed).shuffle(pieces)
        tokens = (
            list(tokenizer(x, truncation=False, verbose=False)[_IDS]) for x in pieces if x.strip()
        )
        if not how.pack:
            return list(islice((each[:length] for each in tokens if each), how.samples))
        return _packed(tokens, how.samples, length)


def batches_for(
    model: Any, dataset: Any, how: Calibration, *, tokenizer: Any
) -> tuple[list[Batch], list[str]]:
    """Return batches of a dataset for a model, and what of them is not as asked for."""
    longest = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    return Data.of(dataset).batches(how, tokenizer=tokenizer, longest=longest)


def _is_sample(item: Any) -> bool:
    """Tell whether something is the tokens of one sample: a list or a row of whole numbers."""
    if isinstance(item, Tensor):
        return item.dim() == 1 and not item.is_floating_point()
    return isinstance(item, Sequence) and bool(item) and all(isinstance(x, int) for x in item)


def _tokens(row: Any) -> Tokens:
    """Return the tokens of a row that is not filled up, or those that did not fill it up."""
    found = row if isinstance(row, Mapping) else {_IDS: row}
    ids = torch.as_tensor(found[_IDS])
    if ids.dim() != 1:
        raise ConfigError(f"{_IDS} of a row are a list of tokens, not of shape {[*ids.shape]}")
    if (mask := found.get(_MASK)) is not None:
        ids = ids[torch.as_tensor(mask).bool()]
    tokens: Tokens = ids.tolist()
    return tokens


def _shortage(samples: Sequence[Tokens], wanted: int, possible: int) -> list[str]:
    """Tell what samples lack of the length that is wanted, or of that which the model can take."""
    shortest, longest = min(map(len, samples)), max(map(len, samples))
    if shortest >= wanted:
        return []
    if shortest < longest:
        return [f"the shortest sample has {shortest} tokens, not {wanted}"]
    why = "there are no more" if shortest < possible else "the model takes no more"
    return [f"samples of {shortest} tokens, not {wanted}: {why}"]


def _packed(tokens: Iterable[Tokens], samples: int, length: int) -> list[Tokens]:
    stream: Tokens = []
    for each in tokens:
        stream += each
        if len(stream) >= samples * length:
            break
    whole = [stream[i : i + length] for i in range(0, len(stream) - length + 1, length)]
    return whole[:samples] or ([stream] if stream else [])


def _batched(samples: Sequence[Tokens], size: int) -> list[Batch]:
    """Put samples of equal length together: what would fill up others would count as data."""
    alike: dict[int, list[Tokens]] = {}
    for sample in samples:
        alike.setdefault(len(sample), []).append(sample)
    return [
        {_IDS: torch.tensor(group[i : i + size])}
        for group in alike.values()
        for i in range(0, len(group), size)
    ]


def _ready(items: Iterable[Batch], samples: int) -> tuple[list[Batch], int]:
    """Return batches until there are enough samples in them, and how many there are."""
    batches: list[Batch] = []
    count = 0
    for batch in items:
        batches.append(batch)
        count += _count(batch)
        if count >= samples:
            break
    return batches, count


def _count(batch: Batch) -> int:
    values = batch.values() if isinstance(batch, Mapping) else batch
    tensors = [batch] if isinstance(batch, Tensor) else values
    try:
        return next(len(x) for x in tensors if isinstance(x, Tensor) and x.dim())
    except (StopIteration, TypeError):
        raise ConfigError(f"a batch holds no tensor: {type(batch).__name__}") from None


__all__ = ["Batch", "Calibration", "Data", "batches_for"]
