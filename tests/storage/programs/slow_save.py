"""Save until interrupted: python slow_save.py PATH KIND."""

import sys
import time
from pathlib import Path

from model_states import identify, list_files, save_new, save_old

path, kind = Path(sys.argv[1]), sys.argv[2]
save_old(path, kind)
before = list_files(path)


def wait(done):
    if done:
        print("saving", flush=True)
        time.sleep(60)


try:
    save_new(path, kind, progress=wait)
except KeyboardInterrupt:
    assert list_files(path) == before
    print(identify(path))
