"""The installed command, outside the package: Ctrl-C may fall into the import of torch."""

import sys


def main() -> int:
    """Run the command line and return its exit code."""
    try:
        from slimtensors.cli import main as run
    except KeyboardInterrupt:
        print("slimtensors: interrupted", file=sys.stderr)
        return 130
    return run()
