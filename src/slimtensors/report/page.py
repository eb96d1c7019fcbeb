"""The page: one file with everything in it, that opens anywhere and asks nobody."""

import html
import json
from importlib.resources import files

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
    "chain",
    "recipe",
    "main",
)
"""In the order in which they need each other."""


def page(report: Report) -> str:
    """Return the HTML of a report."""
    data = json.dumps(report.to_json(), separators=(",", ":"), allow_nan=False)
    filled = {
        "{{title}}": html.escape(report.title),
        "{{style}}": _read("style.css"),
        "{{script}}": "\n".join(_read(f"{name}.js") for name in _SCRIPTS),
        # Inside of a script, nothing but an end tag or a comment can end or hide the data.
        "{{data}}": data.replace("<", "\\u003c"),
    }
    text = _read("page.html")
    before, after = "", text
    for mark in sorted(filled, key=text.index):
        head, _, after = after.partition(mark)
        before += head + filled[mark]  # what was filled in is not looked at again
    return before + after


def write_page(report: Report, path: StrPath) -> None:
    """Write the HTML of a report to a file that appears complete or not at all."""
    # File names in the report need not be valid text.
    write_file_atomically(local_path(path), page(report).encode("utf-8", "replace"))


def _read(name: str) -> str:
    return files("slimtensors.report").joinpath("assets", name).read_text(encoding="utf-8")
