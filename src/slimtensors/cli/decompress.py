"""`slimtensors decompress`: back to plain safetensors."""

import argparse

from slimtensors.archive import Archive, Progress
from slimtensors.archive.decompress import decompress
from slimtensors.archive.summary import Summary, count_noun, format_bytes
from slimtensors.cli import console
from slimtensors.folder.compress import check_globs, decompress_folder, is_model_folder, match_globs

EXAMPLES = (
    "slimtensors decompress my-model-slim -o my-model",
    "slimtensors decompress small.safetensors --only 'encoder.*' -o encoder.safetensors",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    console.add_target(verb)
    console.add_base(verb)
    console.add_filters(verb, "write")
    console.add_threads(verb)
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Decompress, and print the size of the result."""
    console.require_models(options.source)
    console.refuse_existing(options.output, options.source, options.base, force=options.force)
    keep = match_globs(options.only, options.skip)
    with console.open_model(options) as archive:
        check_globs(archive, options.only + options.skip)
        total = console.dense_bytes(archive.select(name for name in archive if keep(name)))
        with console.progress(total, "decompress") as bar:
            summary = _decompress(options, archive, bar)
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        print(f"{count_noun(len(summary.tensors), 'tensor')}, {format_bytes(summary.stored_bytes)}")
    return 0


def _decompress(options: argparse.Namespace, archive: Archive, bar: Progress) -> Summary:
    keep = match_globs(options.only, options.skip)
    if is_model_folder(options.source):
        return decompress_folder(
            archive,
            options.output,
            keep=keep,
            replace=options.force,
            threads=options.threads,
            progress=bar,
        )
    selected = archive.select(name for name in archive if keep(name))
    return decompress(selected, options.output, threads=options.threads, progress=bar)
