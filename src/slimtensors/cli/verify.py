"""`slimtensors verify`: is it whole, and is it the same?"""

import argparse
import sys

from slimtensors.archive import Archive, Verification, verify
from slimtensors.archive.summary import count_noun
from slimtensors.checkpoint import is_run, state_file, verify_run
from slimtensors.cli import console
from slimtensors.errors import ConfigError
from slimtensors.storage import is_distributed


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "verify",
        "read everything and check every checksum",
        "slimtensors verify my-model-slim --against my-model",
        "slimtensors verify my-run --json",
    )
    console.add_source(verb)
    verb.add_argument(
        "--against", metavar="OTHER", help="compare the bits of all tensors with this"
    )
    console.add_threads(verb)
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print what is wrong, and answer 0, 1 (it differs) or 3 (it is damaged)."""
    if is_run(options.source):
        return _run_folder(options)
    found = _distributed(options) if is_distributed(options.source) else _archive(options)
    if options.json:
        console.print_json(found.to_json())
    for message in found.damaged.values():
        print(f"slimtensors: {message}", file=sys.stderr)
    for name, message in found.different.items():
        print(f"slimtensors: {name}: {message}", file=sys.stderr)
    if not options.json and found:
        same = f", the same as in {options.against}" if options.against else ""
        print(f"all {count_noun(found.tensors, 'tensor')} whole{same}")
    if found.damaged:
        return 3
    return 1 if found.different else 0


def _archive(options: argparse.Namespace) -> Verification:
    with Archive(state_file(options.source)) as archive:
        total = sum(map(archive.stored_bytes, archive))
    with console.progress(total, "verify") as bar:
        return verify(
            state_file(options.source),
            against=options.against,
            threads=options.threads,
            progress=bar,
        )


def _distributed(options: argparse.Namespace) -> Verification:
    from slimtensors.checkpoint import distributed  # which takes its time to import torch's

    if options.against:
        raise ConfigError(f"{options.source}: is a distributed checkpoint; consolidate it first")
    return distributed.verify(options.source, threads=options.threads)


def _run_folder(options: argparse.Namespace) -> int:
    """Check all checkpoints of a run."""
    if options.against:
        raise ConfigError(f"{options.source}: holds checkpoints; name one to compare it")
    found = verify_run(options.source, threads=options.threads)
    if options.json:
        console.print_json(
            {
                "ok": bool(found),
                "checkpoints": found.checkpoints,
                "damaged": dict(found.damaged),
                "incomplete": list(found.incomplete),
            }
        )
    for name, message in found.damaged.items():
        print(f"slimtensors: {name}: {message}", file=sys.stderr)
    for name in found.incomplete:
        print(f"slimtensors: {name}: is incomplete; repair removes it", file=sys.stderr)
    if not options.json and found:
        print(f"all {count_noun(found.checkpoints, 'checkpoint')} whole")
    return 0 if found else 3
