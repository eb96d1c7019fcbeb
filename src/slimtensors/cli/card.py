"""The part of a model card that says how a folder is stored."""

import re
from collections import defaultdict

from slimtensors.cli import console
from slimtensors.spec import Json
from slimtensors.summary import Stored, Summary, human

_HEAD = ("stored as", "tensors", "dense", "stored", "bits per weight", "largest error")
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def card(summary: Summary, listing: str, config: Json) -> str:
    """Return front matter for the hub, a table of sizes and errors, and the folded `listing`."""
    kinds: dict[str, list[Stored]] = defaultdict(list)
    for tensor in summary.tensors:
        kinds[tensor.codec.partition("(")[0]].append(tensor)
    rows = [_row(kind, tensors) for kind, tensors in sorted(kinds.items()) if kind != "tied"]
    every = _row("total", [t for t in summary.tensors if t.codec != "tied"])
    table = console.markdown(_HEAD, [*rows, every], left=1)
    folded = f"<details><summary>Every tensor</summary>\n\n{listing}\n\n</details>"
    return f"{_front_matter(config)}\n\n{table}\n\n{folded}"


def _front_matter(config: Json) -> str:
    base = str(config.get("_name_or_path", ""))
    named = f"base_model: {base}" if _HUB_NAME.fullmatch(base) else "# base_model: OWNER/NAME"
    lines = [named, "base_model_relation: quantized", "tags:", "- slimtensors"]
    return "\n".join(["---", *lines, "---"])


def _row(kind: str, tensors: list[Stored]) -> tuple[str, ...]:
    items = sum(t.items for t in tensors)
    stored = sum(t.stored_bytes for t in tensors)
    errors = [t.error for t in tensors if t.error is not None]
    return (
        kind,
        str(len(tensors)),
        human(sum(t.dense_bytes for t in tensors)),
        human(stored),
        f"{8 * stored / items:.2f}" if items else "",
        f"{max(errors):.2%}" if errors else "none",
    )
