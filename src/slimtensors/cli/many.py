"""What verbs do that many processes may share: torchrun starts one for each rank."""

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from slimtensors.cli import console
from slimtensors.errors import ConfigError, RankError, SlimError
from slimtensors.ranks import TIMEOUT, Alone, Ranks, Together, are_several, from_environment


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
def ranks_of(options: argparse.Namespace) -> Iterator[Ranks]:
    """Find the other processes, if there are any; when one fails, all end, and say why."""
    if not are_several():
        yield Alone()
        return
    if options.timeout <= 0:
        raise ConfigError(f"--timeout must be a number of seconds, got {options.timeout:g}")
    ranks = from_environment(timeout=options.timeout)
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
def progress(total: int, what: str, ranks: Ranks) -> Iterator[Callable[[int], object]]:
    """Show a bar for the share of rank 0."""
    if ranks.rank == 0:
        with console.progress(total // ranks.count, what) as bar:
            yield bar
    else:
        yield lambda nbytes: None


def _stop(number: int, frame: FrameType | None) -> None:
    raise RankError("told to stop, as when another rank ends early; run it again to go on")


def _tell(ranks: Together, error: BaseException) -> None:
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
