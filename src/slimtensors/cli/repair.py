"""`slimtensors repair`: remove leftovers of interrupted saves from a run."""

import argparse
import sys

from slimtensors.archive.summary import count_noun
from slimtensors.checkpoint import find_unreadable, repair_run
from slimtensors.cli import console

EXAMPLES = ("slimtensors repair my-run",)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    verb.add_argument("run_folder", metavar="RUN", help="a folder of checkpoints")
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Remove leftovers; print their names, and the unreadable checkpoints that stay."""
    removed = repair_run(options.run_folder)
    left = find_unreadable(options.run_folder)
    for name, problem in left.items():
        print(f"slimtensors: {name}: unreadable, left as it is: {problem}", file=sys.stderr)
    if options.json:
        console.print_json({"removed": removed, "left": left})
        return 0
    for name in removed:
        print(name)
    print(f"{count_noun(len(removed), 'incomplete checkpoint')} removed")
    return 0
