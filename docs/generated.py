"""Parts of pages that are generated: the command line, the JSON schemas, the results."""

import argparse
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from slimtensors.cli import parser
from slimtensors.tensor import Json

SCHEMAS = Path(__file__).parent / "schemas"
RESULTS = Path(__file__).parents[1] / "benchmarks" / "RESULTS.md"


def command_line() -> str:
    """Return a section for every verb."""
    (verbs,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return "\n\n".join(_verb(name, verb) for name, verb in verbs.choices.items())


def _verb(name: str, verb: argparse.ArgumentParser) -> str:
    examples = (verb.epilog or "").partition("\n")[2]
    lines = [f"## {name}", "", verb.description or "", "", "```text"]
    lines += [line.strip() for line in examples.splitlines()]
    lines += ["```", "", "| | |", "|---|---|"]
    for part in _parts(verb):
        if part is not verb:
            lines.append(f"| **{part.prog.split()[-1]}** | |")
        actions = [a for a in part._actions if a.dest != "help" and not _is_nested(a)]
        lines += [f"| `{_name(action)}` | {_cell(action.help or '')} |" for action in actions]
    return "\n".join(lines)


def _is_nested(action: argparse.Action) -> bool:
    return isinstance(action, argparse._SubParsersAction)


def _parts(verb: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yield a verb and the parsers of its actions."""
    yield verb
    for action in verb._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()


def _name(action: argparse.Action) -> str:
    value = action.metavar or "{" + ",".join(map(str, action.choices or ())) + "}"
    if value == "{}":
        value = action.dest if not action.option_strings else action.dest.upper()
    names = ", ".join(action.option_strings)
    return " ".join(filter(None, [names, str(value) if action.nargs != 0 else ""]))


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("*", "\\*")


def schemas() -> str:
    """Return a section for every schema."""
    return "\n\n".join(_schema(path) for path in sorted(SCHEMAS.glob("*.json")))


def _schema(path: Path) -> str:
    schema = json.loads(path.read_text())
    rows = "\n".join(
        f"| `{name}` | {kind} | {_cell(about)} |" for name, kind, about in _fields(schema)
    )
    file = f"{{download}}`{path.name} <schemas/{path.name}>`"
    head = "| field | type | |\n|---|---|---|"
    return f"## {path.stem}\n\n{schema['title']} ({file}).\n\n{head}\n{rows}"


def _fields(schema: Json) -> Iterator[tuple[str, str, str]]:
    """Yield path, type and description of every field, outer ones first."""
    pending = [("", schema)]
    while pending:
        path, at = pending.pop(0)
        at = _resolved(at, schema)
        if path:
            yield path, _kind(at), str(at.get("description", ""))
        inner = [(f"{path}.{key}".lstrip("."), x) for key, x in at.get("properties", {}).items()]
        if "items" in at:
            inner += _of_items(path, _resolved(at["items"], schema))
        pending = inner + pending


def _of_items(path: str, items: Json) -> list[tuple[str, Json]]:
    return [(f"{path}[].{key}", x) for key, x in items.get("properties", {}).items()]


def _resolved(at: Json, schema: Json) -> Json:
    reference = at.get("$ref")
    if reference is None:
        return at
    found = schema
    for key in reference.removeprefix("#/").split("/"):
        found = found[key]
    return {**found, **{key: x for key, x in at.items() if key != "$ref"}}


def _kind(at: Json) -> str:
    if "enum" in at:
        return ", ".join(f"`{json.dumps(x)}`" for x in at["enum"])
    kind = at.get("type", "any")
    return kind if isinstance(kind, str) else " or ".join(kind)


def results() -> str:
    """Return RESULTS.md without its title and introduction, with links relative to docs/."""
    machine_and_sections = RESULTS.read_text().split("\n\n", 2)[2]
    return machine_and_sections.replace("](../docs/", "](")


FILLED: Mapping[str, Callable[[], str]] = {
    "cli": command_line,
    "results": results,
    "schemas": schemas,
}
"""The functions that return the generated part of each page."""
