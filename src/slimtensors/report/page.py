"""The HTML page of a report: one file with data, styles and scripts, no network access."""

import html
import json
from importlib.resources import files
from typing import Any

from slimtensors.errors import escape_text
from slimtensors.report.data import Report
from slimtensors.storage import StrPath, local_path, write_file_atomically

_SCRIPTS = (
    "format",
    "shape",
    "charts",
    "treemap",
    "layers",
    "table",
    "detail",
    "checkpoints",
    "recipe",
    "quantization",
    "fit",
    "main",
)
"""In order of dependency."""


def render_page(report: Report) -> str:
    """Return the HTML of a report."""
    data = json.dumps(_escape(report.to_json()), separators=(",", ":"), allow_nan=False)
    values = {
        "{{title}}": html.escape(escape_text(report.title)),
        "{{style}}": _read_asset("style.css"),
        "{{script}}": "\n".join(_read_asset(f"{name}.js") for name in _SCRIPTS),
        # Inside a script element only `</script` and `<!--` are special.
        "{{data}}": data.replace("<", "\\u003c"),
    }
    template = _read_asset("page.html")
    before, after = "", template
    for placeholder in sorted(values, key=template.index):
        head, _, after = after.partition(placeholder)
        before += head + values[placeholder]  # values are not searched for placeholders
    return before + after


def write_page(report: Report, path: StrPath) -> None:
    """Write the HTML of a report to a file, atomically."""
    # "replace": file names may contain surrogates, which UTF-8 cannot encode
    write_file_atomically(local_path(path), render_page(report).encode("utf-8", "replace"))


def _escape(value: Any) -> Any:
    """Return JSON data whose names cannot change the direction or the lines of a text."""
    match value:
        case str():
            return escape_text(value, keep="\n\t")
        case dict():
            return {key: _escape(part) for key, part in value.items()}
        case list() | tuple():
            return [_escape(part) for part in value]
    return value


def _read_asset(name: str) -> str:
    return files("slimtensors.report").joinpath("assets", name).read_text(encoding="utf-8")
