"""Texts from wherever they are: lists, tables, local files."""

import csv
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slimtensors.container import StrPath
from slimtensors.errors import ConfigError

Row = Mapping[str, Any]

_COLUMNS = ("text", "content", "sentence", "prompt")
"""What a column of texts is called, where nobody says."""


def read(path: StrPath) -> Iterator[str | Row]:
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


def texts_of(items: Iterable[str | Row], *, column: str | None = None) -> Iterator[str]:
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
