"""The command line: one file per verb, imported when the verb is used."""

import _thread
import argparse
import logging
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

import slimtensors
from slimtensors.cli.streams import PREFIX, escape_output
from slimtensors.errors import (
    FormatError,
    MismatchError,
    MissingDependencyError,
    SlimError,
    describe_error,
)

VERBS = {
    "compress": "compress a safetensors file or a model folder",
    "decompress": "write plain safetensors again, bit for bit",
    "convert": "write a model folder in another dialect, or with dense weights",
    "inspect": "show how each tensor is stored and what it costs",
    "verify": "read everything and check every checksum",
    "repair": "remove leftovers of interrupted saves from a run",
    "diff": "store a model as its exact difference from a base",
    "restore": "write the whole model from a delta and its base",
    "pool": "keep many models in one folder, with equal tensors stored once",
    "sync": "publish versions of a model, follow or list them",
    "bench": "compare our presets with other compressors on your tensors",
    "codecs": "list the available codecs",
    "demo": "store a model in every way and show what each costs",
    "env": "print versions, processor and installed extras for a bug report",
    "completion": "print a completion script for your shell",
}
"""Each verb is the module of its name, with `EXAMPLES`, `add_arguments` and `run`."""

NO, USAGE, DAMAGED, MISSING, INTERRUPTED = 1, 2, 3, 4, 130

_NOISY = ("torchao", "torch.utils._pytree")
"""Loggers that warn when transformers imports torchao."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    with escape_output(), _repeat_lost_interrupts():
        return _run(arguments)


@contextmanager
def _repeat_lost_interrupts() -> Iterator[None]:
    """Interrupt again if a KeyboardInterrupt was raised where Python ignores exceptions.

    A signal that arrives while a `__del__` runs would otherwise be printed and forgotten.
    """
    hook = sys.unraisablehook

    def repeat(unraisable: "sys.UnraisableHookArgs") -> None:
        if unraisable.exc_type is KeyboardInterrupt:
            threading.Timer(0.05, _thread.interrupt_main).start()  # in this hook it would be lost
        else:
            hook(unraisable)

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _run(arguments: Sequence[str] | None) -> int:
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.ERROR)
    words = sys.argv[1:] if arguments is None else list(arguments)
    verb = next((word for word in words if not word.startswith("-")), None)
    try:
        options = parser([verb] if verb in VERBS else []).parse_args(words)
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
        sys.stderr.close()  # stdout is closed; without this, Python prints a warning at exit
        return 0
    except OSError as error:
        return _fail(describe_error(error), USAGE)
    except KeyboardInterrupt:
        return _fail("interrupted", INTERRUPTED)


def parser(complete: Sequence[str | None] = tuple(VERBS)) -> argparse.ArgumentParser:
    """Return the parser; the verbs in `complete` are imported, others have only their help line."""
    top = argparse.ArgumentParser(
        prog="slimtensors",
        description="Store PyTorch models compactly, in plain safetensors files.",
        epilog="Exit codes: 0 done, 1 the answer is no, 2 usage, 3 damaged file, "
        "4 missing package, 130 interrupted.",
    )
    top.add_argument("--version", action="version", version=slimtensors.__version__)
    verbs = top.add_subparsers(metavar="VERB", required=True)
    for name, help in VERBS.items():
        verb = verbs.add_parser(
            name,
            help=help,
            description=f"{help[0].upper()}{help[1:]}.",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in complete:
            module = _import_verb(name)
            verb.epilog = "\n  ".join(["examples:", *module.EXAMPLES])
            module.add_arguments(verb)
            verb.set_defaults(run=module.run)
    return top


def _import_verb(name: str) -> ModuleType:
    return import_module(f"{__name__}.{name}")


def _fail(message: object, code: int) -> int:
    print(f"{PREFIX}{message}", file=sys.stderr)
    return code
