"""Shared by the verbs: options, progress, tables, several processes."""

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

from tqdm import tqdm

from slimtensors.archive import Archive
from slimtensors.errors import ConfigError, RankError, SlimError
from slimtensors.folder.processes import (
    TIMEOUT,
    ProcessGroup,
    SingleProcess,
    TorchProcessGroup,
    is_multi_process,
    process_group_from_env,
)
from slimtensors.storage import INCOMPLETE, locate
from slimtensors.tensor import Json

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]


def new_verb(verbs: "Verbs", name: str, help: str, *examples: str) -> argparse.ArgumentParser:
    """Add a verb, with examples under its help."""
    return verbs.add_parser(
        name,
        help=help,
        description=help[0].upper() + help[1:] + ".",
        epilog="\n  ".join(["examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def add_source(verb: argparse.ArgumentParser) -> None:
    """Add the argument that names what is read."""
    verb.add_argument("source", help="a file, a folder, an index.json, or a URL (s3://...)")


def add_target(verb: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Add the options that name what is written."""
    verb.add_argument(
        "-o", "--output", required=required, help="file or folder to write, or a URL (s3://...)"
    )
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
    where = locate(target)
    if not force and where.exists() and not where.child(INCOMPLETE).exists():
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


def add_timeout(verb: argparse.ArgumentParser) -> None:
    """Add how long to wait for others."""
    verb.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help=f"under torchrun, give up a rank that does nothing for so long (default: {TIMEOUT:g})",
    )


@contextmanager
def process_group(options: argparse.Namespace) -> Iterator[ProcessGroup]:
    """Find the other processes, if there are any; when one fails, all end, and say why."""
    if not is_multi_process():
        yield SingleProcess()
        return
    if options.timeout <= 0:
        raise ConfigError(f"--timeout must be a number of seconds, got {options.timeout:g}")
    ranks = process_group_from_env(timeout=options.timeout)
    before = signal.signal(signal.SIGTERM, _stop)
    try:
        yield ranks
        ranks.leave()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself, and first says why
        _tell(ranks, error)
        named = _named(error, ranks.rank)
        raise named from error.__cause__
    signal.signal(signal.SIGTERM, before)


@contextmanager
def rank_progress(total: int, what: str, ranks: ProcessGroup) -> Iterator[Callable[[int], object]]:
    """Show a bar for the share of rank 0."""
    if ranks.rank == 0:
        with progress(total // ranks.count, what) as bar:
            yield bar
    else:
        yield lambda nbytes: None


def _stop(number: int, frame: FrameType | None) -> None:
    raise RankError("told to stop, as when another rank ends early; run it again to go on")


def _tell(ranks: TorchProcessGroup, error: BaseException) -> None:
    """Tell the others, unless it was they who failed."""
    if not isinstance(error, RankError):
        with suppress(RankError):
            ranks.fail(error if str(error) else type(error).__name__)


def _named(error: BaseException, rank: int) -> BaseException:
    """Return an error that is meant for people with the rank that it happened to."""
    if not isinstance(error, SlimError | OSError):
        return error
    text = f"rank {rank}: {error}"
    if isinstance(error, OSError):
        return OSError(text)
    error.args = (text,)
    return error
