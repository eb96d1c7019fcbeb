"""Kill the replacement of a folder at each line; print the content after each kill.

Arguments: a folder, and `one step` to exchange folders or `two steps` to rename them.
"""

import os
import shutil
import signal
import sys
from pathlib import Path

from slimtensors.storage import atomic


def write(folder, word):
    for name in ("a.safetensors", "b.safetensors"):
        (folder / name).write_text(word)


def read(folder):
    """Return the word in all files of a folder."""
    words = {file.read_text() for file in folder.iterdir()} if folder.exists() else {"nothing"}
    return words.pop() if len(words) == 1 else "a mixture"


def replace(target, number):
    """Replace the target, and kill the process before the line with this number."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        if count == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(
        lambda frame, event, arg: trace if frame.f_code.co_filename == atomic.__file__ else None
    )
    with atomic.create_folder(target, replace=True) as new:
        write(new, "new")
    os._exit(0)


folder = Path(sys.argv[1])
if sys.argv[2] == "two steps":
    atomic._exchange = lambda a, b: False
number, killed = 0, True
while killed:
    number += 1
    shutil.rmtree(folder, ignore_errors=True)
    target = folder / "model"
    target.mkdir(parents=True)
    write(target, "old")
    if (child := os.fork()) == 0:
        replace(target, number)
    killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    found = read(target)
    if found == "nothing":
        (hidden,) = folder.glob(".model.*.slimtensors-old")
        found = f"{read(hidden)}, hidden"
    for _ in range(2 if "hidden" in found else 1):  # the first write keeps the only complete folder
        with atomic.create_folder(target, replace=True) as new:
            write(new, "newer")
    assert read(target) == "newer", number
    assert [path.name for path in folder.iterdir()] == ["model"], number
    print(found)
