"""How many threads a rank may use, of a machine that it shares with others."""

import os

from slimtensors.archive.workers import cores


def threads_here(threads: int | None) -> int | None:
    """Return `threads`, or this rank's part of the cores if torchrun says how many ranks there are.

    None means all of them.
    """
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    if threads is not None or not ranks.isdigit() or int(ranks) < 2:
        return threads
    return max(1, cores() // int(ranks))
