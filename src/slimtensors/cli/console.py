"""What verbs have in common: options, progress, tables."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tqdm import tqdm

from slimtensors.archive import Archive
from slimtensors.container import local
from slimtensors.errors import ConfigError
from slimtensors.spec import Json
from slimtensors.tables import markdown as markdown
from slimtensors.tables import table as table

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def new_verb(verbs: "Verbs", name: str, help: str, example: str) -> argparse.ArgumentParser:
    """Add a verb, with an example under its help."""
    return verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_source(verb: argparse.ArgumentParser) -> None:
    """Add the argument that names what is read."""
    verb.add_argument("source", help="a file, a folder, an index.json, or a URL (s3://...)")


def add_target(verb: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that name what is written."""
    verb.add_argument("-o", "--output", required=required, help="file or folder to write")
    verb.add_argument("-f", "--force", action="store_true", help="replace what is there")
    verb.add_argument("-q", "--quiet", action="store_true", help="print nothing but errors")


def add_shard_size(verb: argparse.ArgumentParser) -> None:
    """Add the size of files."""
    verb.add_argument(
        "--max-shard-size", metavar="SIZE", help="start a new file at 5GB, 512MiB, ..."
    )


def add_filters(verb: argparse.ArgumentParser, what: str) -> None:
    """Add options that choose tensors by name."""
    verb.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help=f"{what} only these tensors"
    )
    verb.add_argument(
        "--skip", action="append", default=[], metavar="GLOB", help=f"do not {what} these tensors"
    )


def add_threads(verb: argparse.ArgumentParser) -> None:
    """Add the number of threads."""
    verb.add_argument("-T", "--threads", type=int, metavar="N", help="threads (default: all cores)")


def add_json(verb: argparse._ActionsContainer) -> None:
    """Add the output for machines."""
    verb.add_argument("--json", action="store_true", help="print JSON (see docs/schemas)")


def dense_bytes(archive: Archive) -> int:
    """Return how many bytes the tensors of an archive have in memory; tied ones count once."""
    tied = archive.tied()
    return sum(archive.spec(name).nbytes for name in archive if name not in tied)


def print_json(data: Json) -> None:
    """Print one JSON document."""
    print(json.dumps(data, indent=2))


def refuse_existing(target: str, *, force: bool) -> None:
    """Raise unless `target` is free or may be replaced."""
    if local(target).exists() and not force:
        raise ConfigError(f"{target}: exists already; -f replaces it")


@contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a bar on stderr that counts bytes, if somebody is looking."""
    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:
        yield bar.update
