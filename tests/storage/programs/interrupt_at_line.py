"""Interrupt saves at each line of the writer: python interrupt_at_line.py FOLDER."""

import contextlib
import sys

from model_states import check_each_kind, identify, list_files, save_new
from writer_lines import find_lines, restore_old, trace_line


def interrupt(count, line):
    sys.settrace(None)
    raise KeyboardInterrupt


def check(path, kind):
    with_leftovers, lines = set(), find_lines(path, kind)
    restore_old(path, kind)
    for number, line in lines.items():
        before = list_files(path)
        trace_line(number, interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            save_new(path, kind)
        sys.settrace(None)
        found = identify(path)
        assert found in ("old", "new"), (line, found)
        after = list_files(path)
        files = [name for name in after if "slimtensors-" not in name]
        if files != after:
            with_leftovers.add(line)
        assert found == "new" or files == before, (line, before, files)
        if found == "new" or files != after:
            restore_old(path, kind)
    return len(lines), sorted(with_leftovers)


check_each_kind(check)
