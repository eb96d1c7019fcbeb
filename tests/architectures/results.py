"""The recorded outcomes of the sweeps, and the part of the compatibility page made from them.

PYTHONPATH=tests python -m architectures.results  # writes docs/compatibility.md
"""

import json
import re
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "results.json"
PAGE = Path(__file__).parents[2] / "docs" / "compatibility.md"
START, END = "<!-- architectures: generated -->\n", "<!-- architectures: end -->\n"

PACKAGES = ("transformers", "compressed-tensors", "torch")

CHECKS = {
    "lossless": "lossless folder",
    "int8": "int8 per channel (`W8A8`)",
    "int4": "int4 in groups of 32 (`W4A16`)",
    "2:4 + GPTQ": "recipe: SparseGPT 2:4, GPTQ int4",
    "GPTQ": "recipe: GPTQ int4",
    "Wanda": "recipe: Wanda 50 %",
}
"""Key of a check in the results -> its name on the page."""

OUTCOMES = {
    "right": "right",
    "refused": "refused",
    "upstream": "not loadable, warned",
    "warned": "not loadable as we write it, warned",
    "wrong": "wrong",
}
"""Result of a check -> its name on the page."""

_REASONS = {
    "not divisible by group_size": "columns not divisible by the group size",
    "Conv1D": "no linear layers but transposed ones (Conv1D)",
    "no layer matches Linear": "no linear layers",
    "one to many": "transformers cannot split a weight in a quantized folder",
    "automatic conversion of the weights": "transformers cannot merge the experts",
    "would load random weights": "transformers would load random experts",
    "has no attribute 'weight'": "transformers initializes `weight`, which packed layers lack",
}
"""Pattern in a reason -> its text on the page."""

_NOTHING = re.compile("no layer matches Linear")
"""Reason of a refusal for models that have nothing to quantize."""

_MOSTLY_DENSE = 0.5

Types = dict[str, dict[str, Any]]


def read_types() -> Types:
    """Return {model type: {"class": ..., "kind": ..., check: outcome, ...}}.

    A type that cannot be built has a "reason" instead.
    """
    return json.loads(FILE.read_text())["types"] if FILE.exists() else {}


def read_versions() -> dict[str, str]:
    """Return the versions of the packages that the outcomes were found with."""
    return json.loads(FILE.read_text())["versions"]


def record(model_type: str, **entries: Any) -> None:
    """Add entries to those of a model type; a type that can be built now has no reason any more."""
    types = read_types()
    recorded = {} if "reason" in entries else types.get(model_type, {})
    types[model_type] = {k: v for k, v in recorded.items() if k != "reason"} | entries
    versions = {package: version(package) for package in PACKAGES}
    lines = [f"    {json.dumps(name)}: {json.dumps(types[name])}" for name in sorted(types)]
    text = f'{{\n  "versions": {json.dumps(versions)},\n  "types": {{\n'
    FILE.write_text(text + ",\n".join(lines) + "\n  }\n}\n")


def render() -> str:
    """Return the part of the compatibility page."""
    types = read_types()
    built = {name: entry for name, entry in types.items() if "class" in entry}
    checks = [check for check in CHECKS if any(check in entry for entry in built.values())]
    versions = ", ".join(f"{name} {number}" for name, number in read_versions().items())
    lines = [
        f"{len(types)} model types of transformers were tried; {len(built)} could be built, each"
        f" as a tiny model of its first class ({versions}).",
        "",
        f"| | types | {' | '.join(OUTCOMES.values())} | at the first attempt |",
        "|---|---|" + "---|" * (len(OUTCOMES) + 1),
    ]
    for check in checks:
        outcomes = [entry[check] for entry in built.values() if check in entry]
        results = [outcome["result"] for outcome in outcomes]
        counts = " | ".join(str(results.count(result)) for result in OUTCOMES)
        share = f"{_share_at_once(outcomes):.1%}"
        lines.append(f"| {CHECKS[check]} | {len(results)} | {counts} | {share} |")
    lossless = [entry["lossless"] for entry in built.values() if "lossless" in entry]
    lines += [
        "",
        "*At the first attempt*: the share of types, without those that have nothing to quantize,"
        " for which the command runs as given. Every other one is refused before any work. Nearly"
        " all refusals are of a group size that was chosen and does not fit these tiny models; a"
        " preset without `--group-size` chooses one that fits.",
        "",
        f"The lossless folders are {sum(x['models'] for x in lossless)} models in float32 and"
        f" bfloat16, with and without zeros; {sum(x['forward'] for x in lossless)} of them also ran"
        " forward.",
        "",
        "| check | outcome | reason | types |",
        "|---|---|---|---|",
        *(row for check in checks for row in _list_exceptions(built, check)),
        "",
        *_list_right(built, checks),
        "",
        *_list_missing(types),
    ]
    return "\n".join(lines) + "\n"


def _share_at_once(outcomes: list[dict[str, Any]]) -> float:
    """Return the share of types that have something to quantize for which nothing is refused."""
    suitable = [x for x in outcomes if not any(map(_NOTHING.search, x.get("reasons", ())))]
    refused = sum(x["result"] == "refused" or bool(x.get("ignored")) for x in suitable)
    return 1 - refused / len(suitable)


def _list_exceptions(built: Types, check: str) -> list[str]:
    """Return a row for each reason, with the types that have it."""
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, entry in built.items():
        outcome = entry.get(check, {"result": "right"})
        result = OUTCOMES[outcome["result"]]
        if outcome["result"] != "right":
            groups[result, _shorten(outcome["reasons"][0])].append(name)
        elif outcome.get("ignored"):
            groups[f"{result} with `--ignore`", _shorten(outcome["reasons"][0])].append(name)
        elif outcome.get("dense", 0) > _MOSTLY_DENSE:
            share = f"more than {_MOSTLY_DENSE:.0%} of the parameters of linear layers stay dense"
            groups[result, share].append(name)
    return [
        f"| {check} | {result} | {reason} | {', '.join(names)} |"
        for (result, reason), names in sorted(groups.items())
    ]


def _shorten(reason: str) -> str:
    """Return a reason without the names and numbers of one model."""
    for pattern, text in _REASONS.items():
        if re.search(pattern, reason):
            return text
    text = " ".join(reason.split()).removeprefix("/dense: ")
    text = re.sub(r"\b[\w-]+(\.[\w-]+){2,}", "…", text)
    return re.sub(r"\(?\b\d+\b\)?", "N", text).replace("|", "\\|")[:160]


def _list_right(built: Types, checks: list[str]) -> list[str]:
    names = [
        name
        for name, entry in built.items()
        if all(entry.get(check, {"result": "right"})["result"] == "right" for check in checks)
    ]
    return [f"<details><summary>{len(names)} types right in every check made</summary>", "",
            ", ".join(names), "", "</details>"]  # fmt: skip


def _list_missing(types: Types) -> list[str]:
    missing = {name: entry["reason"] for name, entry in types.items() if "class" not in entry}
    parts = [name for name, reason in missing.items() if reason.endswith("no model class")]
    packages = [name for name, reason in missing.items() if "ImportError" in reason]
    unloadable = [name for name, reason in missing.items() if "not loaded by" in reason]
    others = [name for name in missing if name not in (*parts, *packages, *unloadable)]
    return [
        f"<details><summary>{len(missing)} types that were not checked</summary>",
        "",
        f"- Parts of other models, without a class of their own: {', '.join(parts)}.",
        f"- Packages that are not installed for the tests (timm, natten …): {', '.join(packages)}.",
        f"- Tiny models that transformers itself cannot save and load: {', '.join(unloadable)}.",
        f"- No small config was found: {', '.join(others)}.",
        "",
        "</details>",
    ]


def read_page() -> str:
    """Return the generated part of the page."""
    return PAGE.read_text().partition(START)[2].partition(END)[0]


def write_page() -> None:
    """Replace the generated part of the page."""
    before, _, rest = PAGE.read_text().partition(START)
    PAGE.write_text(before + START + render() + END + rest.partition(END)[2])


if __name__ == "__main__":
    write_page()
