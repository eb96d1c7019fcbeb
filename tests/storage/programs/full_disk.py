"""Save while space runs out.

Arguments: a folder, and `file` to limit the size of files or `disk` to fill the disk.
"""

import errno
import os
import resource
import sys
from pathlib import Path

from model_states import check_each_kind, get_folder, identify, list_files, save_new, save_old

limit = sys.argv[2]
filler = Path(sys.argv[1]) / "filler"


def limit_space(free):
    """Limit the size of files, or the free space of the disk."""
    if limit == "file":
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
        return
    filler.unlink(missing_ok=True)
    disk = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        size = disk.f_bavail * disk.f_frsize - free
        os.posix_fallocate(file.fileno(), 0, max(size, 1))


def read_files(path):
    return {file.name: file.read_bytes() for file in get_folder(path).iterdir()}


def check_error(error):
    codes = {error.errno, getattr(error.__context__, "errno", None)}
    assert codes & {errno.EFBIG, errno.ENOSPC}, repr(error)


def check(path, kind):
    save_old(path, kind)
    before, failed = read_files(path), 0
    small = (0, 4096, 8192, 20_000, 40_960, 81_920, 100_000, 163_840)
    for free in (*small, *range(180_224, 245_760, 8192)):
        limit_space(free)
        try:
            save_new(path, kind)
        except OSError as error:
            failed += 1
            check_error(error)
            assert read_files(path) == before, (free, list_files(path))
            assert identify(path) == "old"
        else:
            assert identify(path) == "new"
            limit_space(1 << 20)
            save_old(path, kind)
            before = read_files(path)
    limit_space(1 << 20)
    save_new(path, kind)
    last = identify(path)
    if limit == "disk":  # free the space for the next kind
        for file in path.parent.rglob("*.safetensors"):
            file.unlink()
        if path.is_file():
            path.unlink()
    return failed, last


check_each_kind(check)
