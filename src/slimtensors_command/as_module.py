"""`python -m slimtensors` imports the package before it runs any of it: Ctrl-C is told here."""

import sys
from types import TracebackType


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in a line that Ctrl-C came, and anything else as Python does."""
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("slimtensors: interrupted", file=sys.stderr)
    sys.exit(130)


if sys.argv[:1] == ["-m"]:  # so Python calls what it is still looking for
    sys.excepthook = tell
