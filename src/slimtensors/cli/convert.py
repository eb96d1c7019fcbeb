"""`slimtensors convert`: a model folder in another dialect, or dense."""

import argparse
from typing import get_args

from slimtensors.cli import console
from slimtensors.folder.convert import Kind, convert_folder
from slimtensors.folder.weights import FolderOptions

EXAMPLES = (
    "slimtensors convert my-model-w4a16 --to dense -o my-model-dense",
    "slimtensors convert my-model-w4a16 --to slim --max-shard-size 2GB -o my-model-small",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    console.add_target(verb)
    verb.add_argument("--to", required=True, choices=get_args(Kind), help="format of the weights")
    console.add_base(verb)
    console.add_shard_size(verb)
    console.add_threads(verb)
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Convert, and print the sizes before and after."""
    console.require_models(options.source)
    console.refuse_existing(options.output, options.source, options.base, force=options.force)
    with (
        console.open_model(options) as archive,
        console.progress(console.dense_bytes(archive), "convert") as bar,
    ):
        folder_options = FolderOptions(
            max_shard_size=options.max_shard_size,
            replace=options.force,
            threads=options.threads,
            progress=bar,
        )
        summary = convert_folder(archive, options.output, to=options.to, how=folder_options)
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        print(summary)
    return 0
