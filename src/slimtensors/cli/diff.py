"""`slimtensors diff`: store a model as its difference from another one."""

import argparse
from functools import partial

from slimtensors.archive.delta import BaseMatch, diff
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import count_noun, format_bytes
from slimtensors.cli import console
from slimtensors.errors import ConfigError
from slimtensors.folder.compress import is_model_folder
from slimtensors.folder.delta import diff_folder

EXAMPLES = (
    "slimtensors diff my-model my-finetune -o my-finetune-delta",
    "slimtensors diff my-finetune --base my-model -o my-finetune-delta",
    "slimtensors diff my-finetune --base s3://bucket/my-model -o my-finetune-delta",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    verb.add_argument(
        "sources",
        nargs="+",
        metavar="MODEL",
        help="BASE and MODEL, or MODEL alone with --base: files, folders, or URLs (s3://...)",
    )
    verb.add_argument("--base", metavar="BASE", help="the base model, if only MODEL is given")
    verb.add_argument(
        "--base-model",
        metavar="OWNER/NAME",
        help="name of the base on the hub, recorded so that the delta finds it in the hub cache"
        " (default: that of a base in this cache)",
    )
    verb.add_argument("--base-revision", metavar="REV", help="its commit, branch or tag")
    console.add_target(verb, force="replace an existing target, accept an unrelated base")
    console.add_threads(verb)
    console.add_json(verb)


def _choose_models(options: argparse.Namespace) -> tuple[str, str]:
    """Return the base and the model; raise if it is unclear which is which."""
    match options.sources, options.base:
        case [[base, model], None]:
            return base, model
        case [[model], str(base)]:
            return base, model
        case [[model], None]:
            raise ConfigError(
                f"diff needs two models: slimtensors diff BASE {model} -o DELTA, or"
                f" slimtensors diff {model} --base BASE -o DELTA"
            )
        case [sources, None]:
            raise ConfigError(f"diff takes BASE and MODEL, got {len(sources)} models")
    raise ConfigError(
        f"diff got {len(options.sources)} models and --base {options.base}; omit --base, and name"
        " the base first: slimtensors diff BASE MODEL -o DELTA"
    )


def run(options: argparse.Namespace) -> int:
    """Write the delta and print its size."""
    first, second = _choose_models(options)
    console.require_models(first, second)
    console.refuse_existing(options.output, first, second, force=options.force)
    with open_archive(first) as base, open_archive(second) as archive:
        total = console.dense_bytes(archive)
        match = BaseMatch.of(archive, base)
        write = diff
        if is_model_folder(second):
            write = partial(diff_folder, replace=options.force)
        with console.progress(total, "diff") as bar:
            summary = write(
                archive,
                base,
                options.output,
                unrelated=options.force,
                base_model=options.base_model,
                base_revision=options.base_revision,
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
