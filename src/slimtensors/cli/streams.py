"""Output to a terminal, which names in files must not control."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any, TextIO, cast

from slimtensors.errors import escape_text

PREFIX = "slimtensors: "
"""Start of every message on stderr."""


class EscapedStream:
    """A text stream that writes control characters of names and messages as escapes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        """Write text; line breaks and tabs stay, and so do progress bars on a terminal."""
        if text.startswith(("\r", "\x1b[A")) and self._stream.isatty():
            return self._stream.write(text)
        if text.startswith(PREFIX):  # a name in a message must not look like another message
            text = text.replace("\n", "\n  ")
        return self._stream.write(escape_text(text, keep="\n\t"))


@contextmanager
def escape_output() -> Iterator[None]:
    """Write everything to stdout and stderr through an `EscapedStream`."""
    out, error = (cast(TextIO, EscapedStream(x)) for x in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(error):
        yield
