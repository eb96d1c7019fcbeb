"""Raise SIGINT when torch is imported; Python imports this module at start from PYTHONPATH."""

import signal
import sys


class Interrupter:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            signal.raise_signal(signal.SIGINT)


sys.meta_path.insert(0, Interrupter())
