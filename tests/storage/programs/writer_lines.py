"""Run an action at any line of the writer."""

import shutil
import sys
from pathlib import Path

from model_states import get_folder, save_new, save_old

from slimtensors import storage

TRACED = {str(Path(storage.__file__).parent / name) for name in ("atomic.py", "writer.py")}


def trace_line(number, action):
    """Call `action` before the line of the writer with this number in order of execution.

    Without a number, call it before every line.
    """
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if number in (count, None):
                code = frame.f_code
                action(count, f"{Path(code.co_filename).name} {code.co_name} {frame.f_lineno}")
        return trace

    sys.settrace(lambda frame, event, arg: trace if frame.f_code.co_filename in TRACED else None)


def find_lines(path, kind):
    """Return the number of the first and of the last execution of each line of the writer."""
    first, last = {}, {}

    def record(count, line):
        first.setdefault(line, count)
        last[line] = count

    save_old(path, kind)
    trace_line(None, record)
    save_new(path, kind)
    sys.settrace(None)
    return {number: line for table in (first, last) for line, number in table.items()}


def restore_old(path, kind):
    """Remove all files and save the old model."""
    for file in get_folder(path).iterdir():
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    save_old(path, kind)
