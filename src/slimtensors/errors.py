"""The error tree.

Every deliberate error derives from `SlimError` and from the closest builtin::

    SlimError
    ├── FormatError                  the file does not follow the format
    │   ├── CorruptFileError         truncated, out of bounds, wrong checksum
    │   ├── MixedShardsError         shards of different saves, or replaced while being opened
    │   ├── MissingFileError         listed in an index, but not found
    │   ├── UnsupportedVersionError  written by a newer version
    │   └── UnknownCodecError        the codec is not registered
    ├── ConfigError                  invalid option or unknown name
    │   └── SingularError            the calibration data is rank-deficient
    ├── MismatchError                wrong base for a delta, state dict does not fit the model
    │   └── MissingBaseError         the pretrained model of a checkpoint was not found, or changed
    ├── StatusError                  steps called in the wrong order
    ├── InUseError                   another process is writing to the same folder
    ├── RankError                    another rank failed, or this one was stopped
    ├── UnsupportedTensorError       the tensor cannot be stored
    ├── UnsupportedOperationError    the operation is not implemented for compressed tensors
    └── MissingDependencyError       an optional package is not installed
"""

import difflib
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from json import JSONDecodeError


class SlimError(Exception):
    """Base class of all deliberate errors."""


class FormatError(SlimError, ValueError):
    """The file does not follow the format."""


class CorruptFileError(FormatError):
    """The file is damaged: truncated, out of bounds, wrong checksum."""


class MixedShardsError(FormatError):
    """The shards are of different saves, or were replaced while they were opened."""


class MissingFileError(FormatError, FileNotFoundError):
    """A file that an index lists does not exist."""


class UnsupportedVersionError(FormatError):
    """The file was written by a newer version."""


class UnknownCodecError(FormatError):
    """The codec is not registered."""


class ConfigError(SlimError, ValueError):
    """An option is invalid or does not exist."""


class SingularError(ConfigError):
    """The calibration inputs of a layer are rank-deficient."""


class MismatchError(SlimError, ValueError):
    """Two inputs do not match: wrong base for a delta, or a state dict of another model."""


class MissingBaseError(MismatchError):
    """The pretrained model that a checkpoint needs was not found, or is another one."""


class StatusError(SlimError, RuntimeError):
    """Steps were called in the wrong order."""


class InUseError(SlimError, RuntimeError):
    """Another process is writing to the same folder."""


class RankError(SlimError, RuntimeError):
    """Another rank of the same run failed, or this one was stopped."""


class UnsupportedTensorError(SlimError, TypeError):
    """The tensor cannot be stored."""


class UnsupportedOperationError(SlimError, NotImplementedError):
    """The operation is implemented for dense tensors only."""


class MissingDependencyError(SlimError, ImportError):
    """An optional package is not installed."""

    def __init__(self, package: str, extra: str | None = None) -> None:
        target = package if extra is None else f"'slimtensors[{extra}]'"
        super().__init__(f"this needs {package}; install it with: pip install {target}")


_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""Errors that a parser raises for data it did not expect."""


@contextmanager
def report_malformed(
    document: str, kind: type[SlimError] = CorruptFileError, *, computes: bool = False
) -> Iterator[None]:
    """Raise `kind` if the code inside fails on malformed data; the message names the document.

    Errors that are a `FormatError` or `kind` already only get the name. With `computes`, the code
    inside also runs torch on what it has read, which may refuse its dtypes or shapes.
    """
    try:
        yield
    except (FormatError, kind) as error:
        if str(error).startswith(document):
            raise
        raise type(error)(f"{document}: {error}") from error
    except _MALFORMED as error:
        if isinstance(error, SlimError) and not isinstance(error, ConfigError):
            raise
        raise kind(f"{document}: {_explain_malformed(error)}") from error
    except RuntimeError as error:
        if not computes or isinstance(error, SlimError) or "allocate memory" in str(error):
            raise
        raise kind(f"{document}: {str(error)[:200]}") from error


def _explain_malformed(error: Exception) -> str:
    match error:
        case SlimError():
            return str(error)
        case JSONDecodeError():
            return f"invalid JSON: {error}"
        case RecursionError():
            return "nested too deeply"
    return f"malformed: {repr(error)[:200]}"


def describe_error(error: Exception) -> str:
    """Return the message of an error; that of a system error without its number: path, reason."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    paths = [os.fsdecode(path) for path in (error.filename, error.filename2) if path is not None]
    reason = error.strerror[:1].lower() + error.strerror[1:]
    return f"{' and '.join(paths)}: {reason}" if paths else reason


def suggest(name: str, known: Iterable[str]) -> str:
    """Return the end of an error message: the name closest to `name`, or all known names."""
    names = sorted(map(str, known))  # also members of a StrEnum
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"


def shorten_list(names: Sequence[str], limit: int = 6) -> str:
    """Return the first names of a list, and the number of the others."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def group_names(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return a short list of the names for each reason, from pairs of a name and a reason."""
    names: dict[str, list[str]] = {}
    for name, reason in pairs:
        names.setdefault(reason, []).append(name)
    return {reason: shorten_list(each) for reason, each in names.items()}


def describe_problems(pairs: Iterable[tuple[str, str]]) -> str:
    """Return all problems, from pairs of a name and a problem: a line for each problem."""
    return "\n".join(f"{names}: {problem}" for problem, names in group_names(pairs).items())


def escape_text(text: str, *, keep: str = "") -> str:
    r"""Return text for a terminal: characters that would control it as escapes such as `\x1b`.

    These are all characters that are not printable: control characters, line breaks, overrides of
    the text direction, lone surrogates. Those in `keep` stay.
    """
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() or c in keep else c.encode("unicode_escape").decode() for c in text
    )
