"""`slimtensors diff`: store a model as its difference from another one."""

import argparse
from functools import partial

from slimtensors.archive import Archive
from slimtensors.archive.delta import BaseMatch, diff
from slimtensors.archive.summary import count_noun, format_bytes
from slimtensors.cli import console
from slimtensors.folder.compress import is_model_folder
from slimtensors.folder.delta import diff_folder

EXAMPLES = (
    "slimtensors diff my-finetune --base my-model -o my-finetune-delta",
    "slimtensors diff my-finetune --base s3://bucket/my-model -o my-finetune-delta",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    verb.add_argument("--base", required=True, help="the base model")
    console.add_target(verb, force="replace an existing target, accept an unrelated base")
    console.add_threads(verb)
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Write the delta and print its size."""
    console.require_models(options.source, options.base)
    console.refuse_existing(options.output, options.source, options.base, force=options.force)
    with Archive(options.source) as archive, Archive(options.base) as base:
        total = console.dense_bytes(archive)
        match = BaseMatch.of(archive, base)
        write = diff
        if is_model_folder(options.source):
            write = partial(diff_folder, replace=options.force)
        with console.progress(total, "diff") as bar:
            summary = write(
                archive,
                base,
                options.output,
                unrelated=options.force,
                threads=options.threads,
                progress=bar,
            )
    if options.json:
        console.print_json(summary.to_json() | {"base": match.to_json()})
    elif not options.quiet:
        changed = count_noun(len(summary.tensors), "tensor")
        size = summary.stored_bytes
        times = f", {total / size:.1f}x smaller than the whole model" if size else ""
        print(f"{changed} changed: {format_bytes(size)}{times}; {match}")
    return 0
