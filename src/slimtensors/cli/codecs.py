"""`slimtensors codecs`: list the codecs of this installation."""

import argparse
from dataclasses import fields

from slimtensors import codecs
from slimtensors.archive.summary import format_table
from slimtensors.cli import console

EXAMPLES = ("slimtensors codecs --json",)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Print one line per codec."""
    found = [codecs.find(name) for name in codecs.names()]
    if options.json:
        console.print_json(
            {
                "codecs": [
                    {"name": c.name, "about": _about(c), "options": _options(c)} for c in found
                ]
            }
        )
        return 0
    rows = [(c.name, ", ".join(_options(c)) or "-", _about(c)) for c in found]
    print(format_table(("codec", "options", "about"), rows, left=3))
    return 0


def _about(codec: type[codecs.Codec]) -> str:
    return (codec.__doc__ or "").strip().splitlines()[0]


def _options(codec: type[codecs.Codec]) -> list[str]:
    return [field.name for field in fields(codec)]
