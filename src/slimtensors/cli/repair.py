"""`slimtensors repair`: remove leftovers of interrupted saves from a run."""

import argparse

from slimtensors.archive.summary import count_noun
from slimtensors.checkpoint import repair_run
from slimtensors.cli import console

EXAMPLES = ("slimtensors repair my-run",)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    verb.add_argument("run_folder", metavar="RUN", help="a folder of checkpoints")
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Remove leftovers and print their names."""
    removed = repair_run(options.run_folder)
    if options.json:
        console.print_json({"removed": removed})
        return 0
    for name in removed:
        print(name)
    print(f"{count_noun(len(removed), 'incomplete checkpoint')} removed")
    return 0
