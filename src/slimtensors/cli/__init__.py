"""The command line: one file per verb."""

import argparse
import sys
from collections.abc import Sequence

import slimtensors
from slimtensors.cli import (
    bench,
    codecs,
    completion,
    compress,
    convert,
    decompress,
    demo,
    diff,
    env,
    inspect,
    repair,
    restore,
    verify,
)
from slimtensors.errors import FormatError, MismatchError, MissingDependencyError, SlimError

VERBS = (
    compress,
    decompress,
    convert,
    inspect,
    verify,
    repair,
    diff,
    restore,
    bench,
    codecs,
    demo,
    env,
    completion,
)

NO, USAGE, DAMAGED, MISSING, INTERRUPTED = 1, 2, 3, 4, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except MissingDependencyError as error:
        return _fail(error, MISSING)
    except FormatError as error:
        return _fail(error, DAMAGED)
    except MismatchError as error:
        return _fail(error, NO)
    except SlimError as error:
        return _fail(error, USAGE)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; Python would complain at exit
        return 0
    except OSError as error:
        return _fail(error, USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def parser() -> argparse.ArgumentParser:
    """Return the parser for all verbs."""
    top = argparse.ArgumentParser(
        prog="slimtensors",
        description="Keep PyTorch models small on disk, in plain safetensors files.",
        epilog="Exit codes: 0 done, 1 the answer is no, 2 usage, 3 damaged file, "
        "4 missing package, 130 interrupted.",
    )
    top.add_argument("--version", action="version", version=slimtensors.__version__)
    verbs = top.add_subparsers(metavar="VERB", required=True)
    for verb in VERBS:
        verb.add_to(verbs)
    return top


def _fail(message: object, code: int) -> int:
    print(f"slimtensors: {message}", file=sys.stderr)
    return code
