"""`slimtensors restore`: a whole model from a delta and its base."""

import argparse

from slimtensors.cli import console
from slimtensors.delta import restore, restored
from slimtensors.folder import is_model, restore_folder
from slimtensors.summary import counted, human


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "restore",
        "write the whole model from a delta and its base",
        "slimtensors restore my-finetune-delta --base my-model -o my-finetune",
    )
    console.add_source(verb)
    verb.add_argument("--base", required=True, help="the model that the delta was made from")
    console.add_target(verb)
    console.add_threads(verb)
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Write the model, then say how large it is."""
    console.refuse_existing(options.output, force=options.force)
    total = sum(item.spec.nbytes for item in restored(options.source, options.base).items)
    with console.progress(total, "restore") as bar:
        if is_model(options.source):
            summary = restore_folder(
                options.source,
                options.base,
                options.output,
                replace=options.force,
                threads=options.threads,
                progress=bar,
            )
        else:
            summary = restore(
                options.source, options.base, options.output, threads=options.threads, progress=bar
            )
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        print(f"{counted(len(summary.tensors), 'tensor')}, {human(summary.stored_bytes)}")
    return 0
