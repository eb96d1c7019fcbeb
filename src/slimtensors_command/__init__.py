"""The installed command, outside the package: Ctrl-C may fall into the import of torch."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from slimtensors.cli import main as run
    except KeyboardInterrupt:
        return tell_interruption()
    return run()


def tell_interruption() -> int:
    """Say in a line that Ctrl-C came, and return the exit code."""
    print("slimtensors: interrupted", file=sys.stderr)
    return 130
