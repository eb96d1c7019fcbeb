"""Every error this library raises on purpose.

They derive from each other, and from the builtin that a stranger would expect::

    SlimError
    ├── FormatError                  a file breaks the format
    │   ├── CorruptFileError         it is damaged: truncated, out of bounds, wrong checksum
    │   ├── UnsupportedVersionError  a newer library wrote it
    │   └── UnknownCodecError        it names a codec that nobody registered
    ├── ConfigError                  a bad option or an unknown name
    │   └── SingularError            data that says too little about the weights it flows into
    ├── MismatchError                two things that should fit do not
    ├── StatusError                  a step was taken before the one it needs
    ├── InUseError                   another process is writing there
    ├── RankError                    another process of the same run failed, or this one was stopped
    ├── UnsupportedTensorError       a tensor that cannot be stored
    ├── UnsupportedOperationError    an operation that compressed tensors do not have
    └── MissingDependencyError       an optional package is not installed
"""

import difflib
from collections.abc import Iterable


class SlimError(Exception):
    """Base of all errors raised on purpose."""


class FormatError(SlimError, ValueError):
    """The file does not follow the format."""


class CorruptFileError(FormatError):
    """The file is damaged."""


class UnsupportedVersionError(FormatError):
    """The file was written by a newer library."""


class UnknownCodecError(FormatError):
    """The file, or the caller, names a codec that is not registered."""


class ConfigError(SlimError, ValueError):
    """An option has a bad value or does not exist."""


class SingularError(ConfigError):
    """What flowed into a layer does not tell its weights apart."""


class MismatchError(SlimError, ValueError):
    """Two things that should fit do not."""


class StatusError(SlimError, RuntimeError):
    """A step was taken before the one it needs."""


class InUseError(SlimError, RuntimeError):
    """Another process is writing to the same place."""


class RankError(SlimError, RuntimeError):
    """Another process of the same run failed, or this one was told to stop."""


class UnsupportedTensorError(SlimError, TypeError):
    """A tensor of this kind cannot be stored."""


class UnsupportedOperationError(SlimError, NotImplementedError):
    """A compressed tensor cannot do this; a dense one can."""


class MissingDependencyError(SlimError, ImportError):
    """An optional dependency is needed for this operation."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"this needs {package}; install it with: pip install 'slimtensors[{extra}]'"
        )


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which of `known` was probably meant by `name`, as the end of an error message."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
