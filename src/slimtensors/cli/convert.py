"""`slimtensors convert`: a model folder in another dialect, or dense."""

import argparse
from typing import get_args

from slimtensors.archive import Archive
from slimtensors.cli import console
from slimtensors.folder.convert import Kind, Rewrite, convert_folder


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "convert",
        "write a model folder in another dialect, or with dense weights",
        "slimtensors convert my-model-w4a16 --to dense -o my-model-dense",
        "slimtensors convert my-model-w4a16 --to slim --max-shard-size 2GB -o my-model-small",
    )
    console.add_source(verb)
    console.add_target(verb)
    verb.add_argument("--to", required=True, choices=get_args(Kind), help="how to store weights")
    console.add_shard_size(verb)
    console.add_threads(verb)
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Convert, then say how large it is."""
    console.refuse_existing(options.output, force=options.force)
    with Archive(options.source) as archive:
        total = console.dense_bytes(archive)
    with console.progress(total, "convert") as bar:
        how = Rewrite(options.max_shard_size, options.force, options.threads, bar)
        summary = convert_folder(options.source, options.output, to=options.to, how=how)
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        print(summary)
    return 0
