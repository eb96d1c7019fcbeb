"""Shared by the verbs: options, progress, tables, several processes."""

import argparse
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from tqdm import tqdm

from slimtensors.archive import Archive
from slimtensors.archive.read import open_archive
from slimtensors.checkpoint.manifest import is_checkpoint
from slimtensors.errors import ConfigError, RankError, SlimError
from slimtensors.folder.processes import (
    TIMEOUT,
    ProcessGroup,
    SingleProcess,
    TorchProcessGroup,
    is_multi_process,
    process_group_from_env,
)
from slimtensors.storage import (
    INCOMPLETE,
    LocalLocation,
    check_separate,
    explain_missing,
    locate,
)
from slimtensors.tensor import Json


def add_source(verb: argparse.ArgumentParser) -> None:
    """Add the source argument."""
    verb.add_argument("source", help="a file, a folder, an index.json, or a URL (s3://...)")


def add_base(verb: argparse.ArgumentParser) -> None:
    """Add --base, for verbs that read deltas."""
    verb.add_argument(
        "--base",
        metavar="MODEL",
        help="base of a delta (default: found by its content beside the delta, in the hub cache,"
        " or in SLIMTENSORS_BASES)",
    )


def open_model(options: argparse.Namespace) -> Archive:
    """Open the source; a delta is read as the model that it represents."""
    require_models(*filter(None, (options.source, options.base)))
    return open_archive(options.source, base=options.base)


def add_target(
    verb: argparse.ArgumentParser,
    *,
    required: bool = True,
    force: str = "replace an existing target",
) -> None:
    """Add the options of verbs that write: --output, --force with this help, --quiet."""
    verb.add_argument(
        "-o", "--output", required=required, help="file or folder to write, or a URL (s3://...)"
    )
    verb.add_argument("-f", "--force", action="store_true", help=force)
    verb.add_argument("-q", "--quiet", action="store_true", help="print errors only")


def add_shard_size(verb: argparse.ArgumentParser) -> None:
    """Add --max-shard-size."""
    verb.add_argument(
        "--max-shard-size", metavar="SIZE", help="maximum size of a file: 5GB, 512MiB, ..."
    )


def add_filters(verb: argparse.ArgumentParser, action: str) -> None:
    """Add --only and --skip, which select tensors by name."""
    verb.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="GLOB",
        help=f"{action} only matching tensors",
    )
    verb.add_argument(
        "--skip",
        action="append",
        default=[],
        metavar="GLOB",
        help=f"do not {action} matching tensors",
    )


def add_threads(verb: argparse.ArgumentParser) -> None:
    """Add --threads."""
    verb.add_argument("-T", "--threads", type=int, metavar="N", help="threads (default: all cores)")


def add_json(verb: argparse._ActionsContainer) -> None:
    """Add --json."""
    verb.add_argument("--json", action="store_true", help="print JSON (see docs/schemas)")


def dense_bytes(archive: Archive) -> int:
    """Return the size of all tensors in memory; tied ones count once."""
    tied = archive.tied()
    return sum(archive.spec(name).nbytes for name in archive if name not in tied)


def print_json(data: Json) -> None:
    """Print a JSON document to stdout; NaN and infinity, which JSON lacks, become null."""
    print(json.dumps(_replace_nonfinite(data), indent=2, allow_nan=False))


def _replace_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_nonfinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def require_models(*sources: str) -> None:
    """Raise if a local source does not exist, or is a checkpoint."""
    for source in sources:
        where = locate(source)
        if not isinstance(where, LocalLocation):
            continue
        if not where.exists():
            raise FileNotFoundError(explain_missing(source))
        if is_checkpoint(where.path):
            raise ConfigError(
                f"{source} is a checkpoint, not a model; use inspect or verify, or load it with"
                " slimtensors.checkpoint.load_checkpoint"
            )


def refuse_existing(target: str, *sources: str | None, force: bool) -> None:
    """Raise if `target` is one of the sources, or exists and may not be replaced."""
    where = locate(target)
    check_separate(where, filter(None, sources))
    if not force and where.exists() and not where.child(INCOMPLETE).exists():
        raise ConfigError(f"{target} already exists; use -f to replace it")


@contextmanager
def progress(total: int, label: str) -> Iterator[Callable[[int], object]]:
    """Show a progress bar in bytes on stderr if it is a terminal; yield its update function."""
    with tqdm(
        total=total,
        desc=label,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
        leave=False,
    ) as bar:
        yield bar.update


@contextmanager
def hide_transformers_progress() -> Iterator[None]:
    """Hide the progress bars of transformers, which would overwrite ours."""
    from transformers.utils import logging

    is_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if is_shown:
            logging.enable_progress_bar()


def add_timeout(verb: argparse.ArgumentParser) -> None:
    """Add --timeout, for runs with several processes."""
    verb.add_argument(
        "--timeout",
        type=float,
        default=TIMEOUT,
        metavar="S",
        help=f"under torchrun, seconds to wait for an inactive rank (default: {TIMEOUT:g})",
    )


@contextmanager
def process_group(options: argparse.Namespace) -> Iterator[ProcessGroup]:
    """Join the processes of torchrun, if any; if one rank fails, all stop with its error."""
    if not is_multi_process():
        yield SingleProcess()
        return
    if options.timeout <= 0:
        raise ConfigError(f"--timeout must be a number of seconds, got {options.timeout:g}")
    group = process_group_from_env(timeout=options.timeout)
    before = signal.signal(signal.SIGTERM, _raise_stopped)
    try:
        yield group
        group.leave()
    except BaseException as error:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # report the error before exiting
        _notify_others(group, error)
        with_rank = _add_rank(error, group.rank)
        raise with_rank from error.__cause__
    signal.signal(signal.SIGTERM, before)


@contextmanager
def rank_progress(total: int, label: str, group: ProcessGroup) -> Iterator[Callable[[int], object]]:
    """Show a progress bar for the share of rank 0, and none on other ranks."""
    if group.rank == 0:
        with progress(total // group.count, label) as bar:
            yield bar
    else:
        yield lambda nbytes: None


def _raise_stopped(number: int, frame: FrameType | None) -> None:
    raise RankError("stopped by SIGTERM, as when another rank exits early; run it again to resume")


def _notify_others(group: TorchProcessGroup, error: BaseException) -> None:
    """Send an error of this rank to the others."""
    if not isinstance(error, RankError):
        with suppress(RankError):
            group.fail(error if str(error) else type(error).__name__)


def _add_rank(error: BaseException, rank: int) -> BaseException:
    """Return an expected error with the rank in its message; other errors unchanged."""
    if not isinstance(error, SlimError | OSError):
        return error
    text = f"rank {rank}: {error}"
    if isinstance(error, OSError):
        return OSError(text)
    error.args = (text,)
    return error
