"""`slimtensors repair`: remove what interrupted saves have left in a run."""

import argparse

from slimtensors.archive.summary import count_noun
from slimtensors.checkpoint import repair_run
from slimtensors.cli import console


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "repair",
        "remove incomplete checkpoints from a run",
        "slimtensors repair my-run",
    )
    verb.add_argument("run_folder", metavar="RUN", help="a folder of checkpoints")
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Remove them, and say which."""
    removed = repair_run(options.run_folder)
    if options.json:
        console.print_json({"removed": removed})
        return 0
    for name in removed:
        print(name)
    print(f"{count_noun(len(removed), 'incomplete checkpoint')} removed")
    return 0
