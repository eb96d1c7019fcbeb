"""`slimtensors verify`: check all checksums, and compare with another archive."""

import argparse
import sys
from dataclasses import replace

from slimtensors.archive import Archive, Verification, verify
from slimtensors.archive.summary import count_noun
from slimtensors.checkpoint import is_run, state_file, verify_run
from slimtensors.checkpoint.manifest import MANIFEST, UNSEALED
from slimtensors.checkpoint.store import STATE, StoredState
from slimtensors.cli import console
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.storage import is_distributed, locate_folder

EXAMPLES = (
    "slimtensors verify my-model-slim --against my-model",
    "slimtensors verify my-run --json",
)


def add_arguments(verb: argparse.ArgumentParser) -> None:
    """Add the arguments of this verb."""
    console.add_source(verb)
    verb.add_argument(
        "--against", metavar="OTHER", help="compare all tensors bitwise with this archive"
    )
    verb.add_argument(
        "--base",
        metavar="MODEL",
        help="base of a delta: decode its tensors, not only its own bytes",
    )
    console.add_threads(verb)
    console.add_json(verb)


def run(options: argparse.Namespace) -> int:
    """Print every problem; return 0, 1 if tensors differ, or 3 if the source is damaged."""
    if is_run(options.source):
        return _run_folder(options)
    found = _verify(options)
    if options.json:
        console.print_json(found.to_json())
    else:
        print(_verdict(found, options.against), flush=True)
    for message in found.damaged.values():
        print(f"slimtensors: {message}", file=sys.stderr)
    for name, message in found.different.items():
        print(f"slimtensors: {name}: {message}", file=sys.stderr)
    if found.damaged:
        return 3
    return 1 if found.different else 0


def _verify(options: argparse.Namespace) -> Verification:
    if is_distributed(options.source):
        return _distributed(options)
    is_file = state_file(options.source) == options.source
    return _archive(options) if is_file else _checkpoint(options)


def _checkpoint(options: argparse.Namespace) -> Verification:
    """Verify one checkpoint: its manifest, its tensors, and those of its bases."""
    try:
        stored = StoredState(locate_folder(options.source))
        stored.find_pretrained()
    except (FormatError, MismatchError) as error:
        return Verification(0, {MANIFEST: str(error)})
    if not stored.manifest.is_sealed:
        print(f"slimtensors: {options.source}: {UNSEALED}", file=sys.stderr)
    found = _archive(options)
    damaged = dict(found.damaged)
    for folder in stored.bases:
        result = verify(str(folder / STATE), threads=options.threads)
        damaged |= {f"{folder.name}: {name}": text for name, text in result.damaged.items()}
    return replace(found, damaged=damaged)


_FILES = {
    "identical": "the original files come back byte for byte",
    "different": "the headers or the index differ",
    "unknown": "the headers of the original files are not stored",
}


def _verdict(found: Verification, against: str | None) -> str:
    """Return the result in one line."""
    tensors = count_noun(found.tensors, "tensor")
    if found.damaged:
        return f"damaged: {len(found.damaged)} of {tensors}" if found.tensors else "damaged"
    if against is None:
        return f"{tensors} intact"
    if found.different:
        all_names = (found.equal or 0) + len(found.different)
        return f"different from {against}: {found.equal} of {all_names} tensors are equal"
    assert found.files is not None, "set with --against"
    return f"{tensors} intact, bitwise equal to {against}; {_FILES[found.files]}"


def _archive(options: argparse.Namespace) -> Verification:
    with Archive(state_file(options.source)) as archive:
        total = sum(map(archive.stored_bytes, archive))
    with console.progress(total, "verify") as bar:
        return verify(
            state_file(options.source),
            against=options.against,
            base=options.base,
            threads=options.threads,
            progress=bar,
        )


def _distributed(options: argparse.Namespace) -> Verification:
    from slimtensors.checkpoint import distributed  # slow: imports torch.distributed

    if options.against:
        raise ConfigError(f"{options.source} is a distributed checkpoint; consolidate it first")
    return distributed.verify(options.source, threads=options.threads)


def _run_folder(options: argparse.Namespace) -> int:
    """Verify all checkpoints of a run."""
    if options.against:
        raise ConfigError(f"{options.source} is a run; --against compares a single checkpoint")
    found = verify_run(options.source, threads=options.threads)
    if options.json:
        console.print_json(
            {
                "ok": bool(found),
                "checkpoints": found.checkpoints,
                "damaged": dict(found.damaged),
                "incomplete": list(found.incomplete),
                "unsealed": list(found.unsealed),
            }
        )
    for name, message in found.damaged.items():
        print(f"slimtensors: {name}: {message}", file=sys.stderr)
    for name in found.incomplete:
        advice = "`slimtensors repair --delete` removes it"
        print(f"slimtensors: {name}: incomplete; {advice}", file=sys.stderr)
    for name in found.unsealed:
        print(f"slimtensors: {name}: {UNSEALED}", file=sys.stderr)
    if not options.json and found:
        print(f"{count_noun(found.checkpoints, 'checkpoint')} intact")
    return 0 if found else 3
