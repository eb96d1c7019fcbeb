"""`slimtensors restore`: a whole model from a delta and its base."""

import argparse
from functools import partial

from slimtensors.archive.delta import open_restored, restore
from slimtensors.archive.summary import count_noun, format_bytes
from slimtensors.cli import console
from slimtensors.folder.compress import is_model_folder
from slimtensors.folder.delta import restore_folder
from slimtensors.storage import parse_size

EXAMPLES = (
    "slimtensors restore my-finetune-delta -o my-finetune",
    "slimtensors restore my-finetune-delta --base my-model -o my-finetune",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    console.add_base(verb)
    console.add_target(verb)
    console.add_shard_size(verb)
    console.add_threads(verb)
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Write the model and print its size."""
    console.require_models(*filter(None, (options.source, options.base)))
    console.refuse_existing(options.output, options.source, options.base, force=options.force)
    parse_size(options.max_shard_size)
    model = open_restored(options.source, options.base)
    total = console.dense_bytes(model)
    write = restore
    if is_model_folder(options.source):
        write = partial(restore_folder, replace=options.force)
    with console.progress(total, "restore") as bar:
        summary = write(
            model,
            None,
            options.output,
            max_shard_size=options.max_shard_size,
            threads=options.threads,
            progress=bar,
        )
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        print(f"{count_noun(len(summary.tensors), 'tensor')}, {format_bytes(summary.stored_bytes)}")
    return 0
