"""The page: one file with everything in it, that opens anywhere and asks nobody."""

import html
import json
import os
from importlib.resources import files

from slimtensors.report.data import Report
from slimtensors.storage import StrPath, local_path

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
    """Write the HTML of a report to a file that appears whole or not at all."""
    target = local_path(path)
    temporary = target.with_name(f".{target.name}.slimtensors-tmp")
    try:
        with temporary.open("wb") as file:
            file.write(page(report).encode("utf-8", "replace"))  # names of files may be no text
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def _read(name: str) -> str:
    return files("slimtensors.report").joinpath("assets", name).read_text(encoding="utf-8")
