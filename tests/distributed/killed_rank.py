"""The command line for torchrun: rank 1 is killed when it is about to note its second file."""

import os
import signal
import sys

records = 0


def watch(event, arguments):
    global records
    if event == "open" and str(arguments[0]).endswith(".json.slimtensors-tmp"):
        records += 1
        if records == 2:
            os.kill(os.getpid(), signal.SIGKILL)


if os.environ["RANK"] == "1":
    sys.addaudithook(watch)

from slimtensors.cli import main  # noqa: E402

sys.exit(main())
