"""`slimtensors repair`: list or remove leftovers of interrupted saves in a run."""

import argparse
import sys

from slimtensors.archive.summary import count_noun
from slimtensors.checkpoint import find_incomplete, find_unreadable, repair_run
from slimtensors.cli import console

EXAMPLES = ("slimtensors repair my-run", "slimtensors repair my-run --delete")


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    verb.add_argument("run_folder", metavar="RUN", help="a folder of checkpoints")
    verb.add_argument(
        "--delete", action="store_true", help="remove the leftovers (default: list them)"
    )
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Print the leftovers, remove them on request, and report checkpoints that stay unreadable."""
    found = find_incomplete(options.run_folder)
    removed = repair_run(options.run_folder) if options.delete else []
    left = find_unreadable(options.run_folder)
    for name, problem in left.items():
        print(f"slimtensors: {name}: unreadable, left as it is: {problem}", file=sys.stderr)
    if options.json:
        console.print_json({"found": found, "removed": removed, "left": left})
        return 0
    for name in removed if options.delete else found:
        print(name)
    if options.delete:
        print(f"{count_noun(len(removed), 'incomplete checkpoint')} removed")
    else:
        advice = "; --delete removes them" if found else ""
        print(f"{count_noun(len(found), 'incomplete checkpoint')} found{advice}")
    return 0
