"""`python -m slimtensors` imports the package before it runs any of it: Ctrl-C is told here."""

import sys
from itertools import pairwise
from types import TracebackType

from slimtensors_command import tell_interruption

_before = sys.excepthook


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Say in a line that Ctrl-C came, and anything else as before."""
    if not issubclass(kind, KeyboardInterrupt):
        _before(kind, error, trace)
        return
    sys.exit(tell_interruption())


# "-m" is what Python calls the program while it is still looking for it.
if sys.argv[:1] == ["-m"] and ("-m", "slimtensors") in pairwise(sys.orig_argv):
    sys.excepthook = tell
