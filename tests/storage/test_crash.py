"""An interrupted save leaves either the complete old model or the complete new one."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_tools import TESTS, leftovers, run, sample
from strategies import bits

import slimtensors
from slimtensors.errors import SlimError

pytestmark = pytest.mark.crash

linux = pytest.mark.skipif(sys.platform != "linux", reason="uses what Linux tells about processes")

STATES = """
import errno, json, os, random, resource, signal, sys, time
from pathlib import Path
import torch
import slimtensors
from slimtensors import storage
from strategies import bits, same_bits
torch.set_num_threads(1)  # a process that has started none can be forked

def state(seed, items=40_000):
    density = {0: 0.3, 1: 1.0, 2: 0.0}
    return {f"t{i}": bits(seed + i, items, torch.float32, density[i]) for i in range(3)}

OLD, NEW = state(0), state(100)

def which(path):
    loaded = slimtensors.load(path, threads=1)
    for label, want in (("old", OLD), ("new", NEW)):
        if loaded.keys() == want.keys() and all(same_bits(loaded[k], x) for k, x in want.items()):
            return label
    return "broken"

def files(path):
    folder = path if path.is_dir() else path.parent
    return sorted(p.name for p in folder.iterdir())

SIZES = {
    "file": (None, None),
    "single to shards": (None, 60_000),
    "shards to single": (60_000, None),
    "shards to shards": (90_000, 60_000),
}

def start(path, kind):
    \"\"\"Put the old model in place.\"\"\"
    if kind != "file":
        path.mkdir(exist_ok=True)
    slimtensors.save(OLD, path, max_shard_size=SIZES[kind][0], threads=1)

def replace(path, kind, **options):
    slimtensors.save(NEW, path, max_shard_size=SIZES[kind][1], threads=1, **options)
"""


@pytest.fixture
def quick(tmp_path) -> Iterator[Path]:
    """Yield a folder in memory, where `fsync` is free; it matters only for power failures."""
    if not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


EACH_KIND = """
found = []
for kind in SIZES:
    folder = Path(sys.argv[1]) / kind.replace(" ", "-")
    folder.mkdir()
    try:
        found.append((kind, check(folder / "model", kind)))
    except BaseException:
        print(kind, file=sys.stderr)
        raise
print(json.dumps(found))
"""

KINDS = ["file", "single to shards", "shards to single", "shards to shards"]


def each_kind(check: str, folder: Path, *args: object, command: Sequence[str] = ()) -> list[Any]:
    """Run a check for each kind of replacement, all in one process; return the results."""
    code = f"{STATES}\n{check}\n{EACH_KIND}"
    done = subprocess.run(
        [*command, sys.executable, *([] if command else ["-c"]), code, *map(str, [folder, *args])],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=TESTS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [kind for kind, _ in found] == KINDS
    return found


KILL = """
def check(path, kind):
    start(path, kind)
    dice = random.Random(kind)
    found = []
    for _ in range(40):
        ready, told = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(told, b"x")
            while True:  # until killed
                replace(path, kind)
                start(path, kind)
        os.read(ready, 1)
        time.sleep(dice.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        os.close(ready), os.close(told)
        assert os.WTERMSIG(status) == signal.SIGKILL, status
        found.append(which(path))
    replace(path, kind)
    return found, which(path)
"""


@linux
@pytest.mark.slow
def test_killing_a_process_while_it_saves_leaves_a_whole_model(quick):
    for kind, (found, last) in each_kind(KILL, quick):
        assert len(found) == 40, kind
        assert set(found) <= {"old", "new"}, kind
        assert last == "new", kind


AT_EVERY_LINE = """
FILES = ("atomic.py", "writer.py")
OURS = {str(Path(storage.__file__).parent / name) for name in FILES}

def at_line(number, act):
    \"\"\"Call `act` when the writer is about to run its line of that number.\"\"\"
    count = 0

    def local(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if number in (count, None):
                code = frame.f_code
                act(count, f"{Path(code.co_filename).name} {code.co_name} {frame.f_lineno}")
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename in OURS else None)

def moments(path, kind):
    \"\"\"Return when each line of the writer runs for the first time and for the last.\"\"\"
    first, last = {}, {}

    def note(count, where):
        first.setdefault(where, count)
        last[where] = count

    start(path, kind)
    at_line(None, note)
    replace(path, kind)
    sys.settrace(None)
    return {number: where for table in (first, last) for where, number in table.items()}

def restart(path, kind):
    for file in path.iterdir() if path.is_dir() else path.parent.iterdir():
        file.unlink()
    start(path, kind)
"""

KILL_AT_LINE = (
    AT_EVERY_LINE
    + """
def check(path, kind):
    points = moments(path, kind)
    for number, where in points.items():
        restart(path, kind)
        child = os.fork()
        if child == 0:
            at_line(number, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            replace(path, kind)
            os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, (where, status)
        found = which(path)
        assert found in ("old", "new"), (where, found)
    return len(points)
"""
)


@linux
@pytest.mark.slow
def test_killing_a_process_at_any_line_of_the_writer_leaves_a_whole_model(quick):
    for kind, lines in each_kind(KILL_AT_LINE, quick):
        assert lines > 50, kind


INTERRUPT_AT_LINE = (
    AT_EVERY_LINE
    + """
def interrupt(count, where):
    sys.settrace(None)
    raise KeyboardInterrupt

def check(path, kind):
    left, points = set(), moments(path, kind)
    restart(path, kind)
    for number, where in points.items():
        before = files(path)
        at_line(number, interrupt)
        try:
            replace(path, kind)
        except KeyboardInterrupt:
            pass
        sys.settrace(None)
        found = which(path)
        assert found in ("old", "new"), (where, found)
        here = [name for name in files(path) if "slimtensors-" not in name]
        if here != files(path):
            left.add(where)
        assert found == "new" or here == before, (where, before, here)
        if found == "new" or here != files(path):
            restart(path, kind)
    return len(points), sorted(left)
"""
)


@linux
@pytest.mark.slow
def test_an_interrupt_at_any_line_of_the_writer_leaves_a_whole_model_and_nothing_else(quick):
    """Python may interrupt between any two lines.

    A temporary file can be left behind only between its creation and its registration.
    """
    for kind, (lines, left) in each_kind(INTERRUPT_AT_LINE, quick):
        assert lines > 50, kind
        made = {"__init__", "__enter__", "add", "create_temporary", "_open_for_lock"}
        assert {where.split()[1] for where in left} <= made, kind


SLOW_SAVE = (
    STATES
    + """
path, kind = Path(sys.argv[1]), sys.argv[2]
start(path, kind)
before = files(path)

def wait(done):
    if done:
        print("saving", flush=True)
        time.sleep(60)

try:
    replace(path, kind, progress=wait)
except KeyboardInterrupt:
    assert files(path) == before
    print(which(path))
"""
)


@linux
@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_while_saving_leaves_the_old_model_and_nothing_else(tmp_path, kind):
    command = [sys.executable, "-c", SLOW_SAVE, str(tmp_path / "model"), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TESTS) as child:
        assert child.stdout.readline() == "saving\n"
        assert leftovers(tmp_path)  # the save has started
        child.send_signal(signal.SIGINT)
        out, _ = child.communicate(timeout=60)
    assert (child.returncode, out) == (0, "old\n")
    assert leftovers(tmp_path) == []


@linux
def test_ctrl_c_in_threads_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "x.safetensors"
    slimtensors.save(sample(), path)
    before = path.read_bytes()
    tensors = {f"t{i}": bits(i, 1 << 20, torch.float32, 0.5) for i in range(8)}

    def interrupt(done: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        slimtensors.save(tensors, path, threads=3, progress=interrupt)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["x.safetensors"]


FULL = """
how, filler = sys.argv[2], Path(sys.argv[1]) / "filler"

def squeeze(free):
    \"\"\"Let only so many bytes more be written: to a file, or to the disk.\"\"\"
    if how == "file":
        resource.setrlimit(resource.RLIMIT_FSIZE, (free, resource.RLIM_INFINITY))
        return
    filler.unlink(missing_ok=True)
    disk = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        size = disk.f_bavail * disk.f_frsize - free
        os.posix_fallocate(file.fileno(), 0, max(size, 1))

def contents(path):
    folder = path if path.is_dir() else path.parent
    return {file.name: file.read_bytes() for file in folder.iterdir()}

def check(path, kind):
    start(path, kind)
    before, failed = contents(path), 0
    small = (0, 4096, 8192, 20_000, 40_960, 81_920, 100_000, 163_840)
    for free in (*small, *range(180_224, 245_760, 8192)):
        squeeze(free)
        try:
            replace(path, kind)
        except OSError as error:
            failed += 1
            codes = {error.errno, getattr(error.__context__, "errno", None)}
            assert codes & {errno.EFBIG, errno.ENOSPC}, repr(error)
            assert contents(path) == before, (free, files(path))
            assert which(path) == "old"
        else:
            assert which(path) == "new"
            squeeze(1 << 20)
            start(path, kind)
            before = contents(path)
    squeeze(1 << 20)
    replace(path, kind)
    last = which(path)
    if how == "disk":  # leave room for the next
        for file in path.parent.rglob("*.safetensors"):
            file.unlink()
        if path.is_file():
            path.unlink()
    return failed, last
"""


@linux
def test_a_file_that_may_not_grow_leaves_the_old_model_and_nothing_else(quick):
    for kind, (failed, last) in each_kind(FULL, quick, "file"):
        assert failed > 3, kind
        assert last == "new", kind


def can_mount() -> bool:
    """Return True if a small disk can be mounted for a child process."""
    if sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    script = "mount -t tmpfs -o size=64k tmpfs /mnt"
    return (
        subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(not can_mount(), reason="mounting a small disk needs root")
def test_a_full_disk_leaves_the_old_model_and_nothing_else(tmp_path):
    mount = 'mount -t tmpfs -o size=2m tmpfs "$1" && exec "$2" -c "$3" "$1" disk'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(tmp_path)]
    for kind, (failed, last) in each_kind(FULL, tmp_path, command=command):
        assert failed > 3, kind
        assert last == "new", kind


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_device_is_not_replaced(tmp_path):
    with pytest.raises(SlimError, match="/dev/full"):
        slimtensors.save(sample(), "/dev/full")


READ_ONLY = (
    STATES
    + """
path = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    slimtensors.save(NEW, path, threads=1)
except PermissionError as error:
    print(which(path))
"""
)


@linux
def test_a_folder_that_may_not_be_written_keeps_its_file():
    with tempfile.TemporaryDirectory() as name:  # accessible to another user
        folder, path = Path(name), Path(name) / "model.safetensors"
        run(STATES + "start(Path(sys.argv[1]), 'file')", path)
        before = path.read_bytes()
        folder.chmod(0o555)
        try:
            assert run(READ_ONLY, path) == "old\n"
            assert path.read_bytes() == before
            assert [p.name for p in folder.iterdir()] == ["model.safetensors"]
        finally:
            folder.chmod(0o755)
