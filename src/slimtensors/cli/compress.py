"""`slimtensors compress`: make a file or a model folder smaller."""

import argparse

from slimtensors import dialects, presets
from slimtensors.archive import Archive, Progress, estimate, save
from slimtensors.cli import console, quantize, recipe
from slimtensors.container import parse_size
from slimtensors.errors import ConfigError
from slimtensors.folder import check_globs, compress_folder, is_model, limited, matching
from slimtensors.summary import Summary, counted, human


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "compress",
        "compress a safetensors file or a model folder",
        "slimtensors compress my-model -o my-model-slim",
    )
    console.add_source(verb)
    console.add_target(verb, required=False)
    verb.add_argument(
        "--preset", help=f"{', '.join(presets.PRESETS)} (default: lossless, exact and small)"
    )
    verb.add_argument(
        "--dialect", help=f"{', '.join(dialects.names())} (default: slim, or what --quantize needs)"
    )
    quantize.add_options(verb)
    recipe.add_option(verb)
    console.add_shard_size(verb)
    verb.add_argument("--dry-run", action="store_true", help="tell the sizes, write nothing")
    console.add_filters(verb, "compress")
    console.add_threads(verb)
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Compress, then say how much smaller it is."""
    if options.recipe is not None:
        return recipe.run(options)
    quantize.check(options)
    if not options.dry_run:
        if options.output is None:
            raise ConfigError("compress needs -o, or --dry-run")
        console.refuse_existing(options.output, force=options.force)
    with Archive(options.source) as archive:
        check_globs(archive, options.only + options.skip)
        parse_size(options.max_shard_size)
        total = console.dense_bytes(archive)
        with console.progress(total, "compress") as bar:
            run = quantize.run if options.quantize else _compress
            summary = run(options, archive, bar)
    if options.json:
        console.print_json(summary.to_json())
    elif not options.quiet:
        sizes = f"{human(total)} -> {human(summary.stored_bytes)}"
        print(summary if options.calibration is None else sizes)
        signed = [tensor.name for tensor in summary.tensors if "-0.0" in tensor.note]
        if signed:
            what = counted(len(signed), "tensor")
            print(f"{what} with -0.0 among the zeros, kept as values: {signed[0]} ...")
    return 0


def _compress(options: argparse.Namespace, archive: Archive, bar: Progress) -> Summary:
    dialect = options.dialect or "slim"
    keep = matching(options.only, options.skip)
    preset = options.preset or presets.default(dialect)
    choose = limited(presets.find(preset), keep)
    if options.dry_run:
        return estimate(
            archive, preset=choose, dialect=dialect, threads=options.threads, progress=bar
        )
    if is_model(options.source):
        return compress_folder(
            options.source,
            options.output,
            preset=preset,
            dialect=dialect,
            keep=keep,
            max_shard_size=options.max_shard_size,
            replace=options.force,
            threads=options.threads,
            progress=bar,
        )
    return save(
        archive,
        options.output,
        preset=choose,
        dialect=dialect,
        max_shard_size=options.max_shard_size,
        threads=options.threads,
        progress=bar,
    )
