"""Kill saves at each line of the writer: python kill_at_line.py FOLDER."""

import os
import signal

from model_states import check_each_kind, identify, save_new
from writer_lines import find_lines, restore_old, trace_line


def check(path, kind):
    lines = find_lines(path, kind)
    for number, line in lines.items():
        restore_old(path, kind)
        child = os.fork()
        if child == 0:
            trace_line(number, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            save_new(path, kind)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, (line, status)
        found = identify(path)
        assert found in ("old", "new"), (line, found)
    return len(lines)


check_each_kind(check)
