"""Command line for torchrun; rank 1 is killed before it opened its second file."""

import os
import signal
import sys

opened = 0


def kill_second_write(event, arguments):
    global opened
    if event != "open":
        return
    name = str(arguments[0])
    if ".json." in name and name.endswith(".slimtensors-tmp"):
        opened += 1
        if opened == 2:
            os.kill(os.getpid(), signal.SIGKILL)


if os.environ["RANK"] == "1":
    sys.addaudithook(kill_second_write)

from slimtensors.cli import main  # noqa: E402

sys.exit(main())
