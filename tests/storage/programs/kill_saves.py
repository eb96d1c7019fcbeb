"""Kill saves at random times: python kill_saves.py FOLDER."""

import os
import random
import signal
import time

from model_states import check_each_kind, identify, save_new, save_old


def check(path, kind):
    save_old(path, kind)
    generator = random.Random(kind)
    found = []
    for _ in range(40):
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(sender, b"x")
            while True:  # until killed
                save_new(path, kind)
                save_old(path, kind)
        os.read(receiver, 1)
        time.sleep(generator.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(receiver)
        os.close(sender)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        found.append(identify(path))
    save_new(path, kind)
    return found, identify(path)


check_each_kind(check)
