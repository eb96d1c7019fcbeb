"""`slimtensors inspect`: what a file holds, and what each tensor costs."""

import argparse

from slimtensors.archive import Archive
from slimtensors.cli import console
from slimtensors.cli.card import card
from slimtensors.folder import check_globs, matching, read_config
from slimtensors.summary import Stored, Summary, human

_HEAD = ("tensor", "dtype", "shape", "codec", "stored", "dense", "bits/item")


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "inspect",
        "show how every tensor is stored",
        "slimtensors inspect my-model-slim --only '*.mlp.*'",
    )
    console.add_source(verb)
    console.add_filters(verb, "show")
    form = verb.add_mutually_exclusive_group()
    console.add_json(form)
    form.add_argument("--markdown", action="store_true", help="print a block for a model card")
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the table."""
    keep = matching(options.only, options.skip)
    with Archive(options.source) as archive:
        check_globs(archive, options.only + options.skip)
        summary = archive.select(name for name in archive if keep(name)).summary()
    if options.json:
        console.print_json(summary.to_json())
        return 0
    layout = console.markdown if options.markdown else console.table
    listing = layout(_HEAD, [*map(_row, summary.tensors), _total(summary)], left=4)
    print(card(summary, listing, read_config(options.source)) if options.markdown else listing)
    return 0


def _row(tensor: Stored) -> tuple[str, ...]:
    return (
        tensor.name,
        tensor.dtype,
        "x".join(map(str, tensor.shape)) or "scalar",
        tensor.note if tensor.codec == "tied" else tensor.codec,
        human(tensor.stored_bytes),
        human(tensor.dense_bytes),
        f"{tensor.bits_per_item:.2f}",
    )


def _total(summary: Summary) -> tuple[str, ...]:
    times = f"{summary.ratio:.2f}x"
    return ("total", "", "", times, human(summary.stored_bytes), human(summary.dense_bytes), "")
