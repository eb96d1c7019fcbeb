"""`slimtensors diff`: store a model as its difference from another one."""

import argparse
from functools import partial

from slimtensors.archive import Archive
from slimtensors.archive.delta import diff
from slimtensors.archive.summary import count_noun, format_bytes
from slimtensors.cli import console
from slimtensors.folder.compress import is_model
from slimtensors.folder.delta import diff_folder


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "diff",
        "store a model as its exact difference from a base",
        "slimtensors diff my-finetune --base my-model -o my-finetune-delta",
        "slimtensors diff my-finetune --base s3://bucket/my-model -o my-finetune-delta",
    )
    console.add_source(verb)
    verb.add_argument("--base", required=True, help="the model to differ from")
    console.add_target(verb)
    console.add_threads(verb)
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the delta, then say how large it is."""
    console.refuse_existing(options.output, force=options.force)
    with Archive(options.source) as archive:
        total = console.dense_bytes(archive)
    work = diff
    if is_model(options.source):
        work = partial(diff_folder, replace=options.force)
    with console.progress(total, "diff") as bar:
        summary = work(
            options.source, options.base, options.output, threads=options.threads, progress=bar
        )
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        changed = count_noun(len(summary.tensors), "tensor")
        size = summary.stored_bytes
        times = f", {total / size:.1f}x smaller than whole" if size else ""
        print(f"{changed} changed: {format_bytes(size)}{times}")
    return 0
