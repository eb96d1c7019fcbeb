"""Reports as JSON files."""

import json
from pathlib import Path

from slimtensors.container import StrPath, local, write_json
from slimtensors.errors import CorruptFileError, FormatError
from slimtensors.report.data import FORMAT, Report

_START = 200
"""Characters in which the format is named."""


def is_report(path: StrPath) -> bool:
    """Tell whether this is a file that `write_report` has written."""
    if "://" in str(path) or not str(path).endswith(".json") or not Path(path).is_file():
        return False
    with Path(path).open(encoding="utf-8", errors="replace") as file:
        return f'"{FORMAT}"' in file.read(_START)


def write_report(report: Report, path: StrPath) -> None:
    """Write the JSON file."""
    write_json(local(path), report.to_json())


def read_report(path: StrPath) -> Report:
    """Read the JSON file."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptFileError(f"{path}: is not JSON: {error}") from error
    try:
        return Report.from_json(data)
    except FormatError as error:
        raise type(error)(f"{path}: {error}") from error
