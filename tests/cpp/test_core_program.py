"""The core without Python: known answers, the same on every processor."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "cpp" / "tests"


def find_library():
    """Return the compiled core that the last build left, or skip if there is none."""
    built = sorted(ROOT.glob("build/*/libslim_core.a"), key=lambda path: path.stat().st_mtime)
    sources = [p for p in (ROOT / "cpp").rglob("*") if p.suffix in (".h", ".cpp", ".cmake")]
    newest = max(p.stat().st_mtime for p in sources if TESTS not in p.parents)
    if shutil.which("c++") is None or not built or built[-1].stat().st_mtime < newest:
        pytest.skip("no compiled core newer than its sources: pip install -e . (and a compiler)")
    return built[-1]


def test_all_kernels_of_this_machine_give_the_known_answers(tmp_path):
    program = tmp_path / "test_core"
    command = ["c++", "-std=c++20", "-O1", "-Wall", "-Wextra", "-fopenmp", f"-I{ROOT / 'cpp'}"]
    sources = [TESTS / "test_core.cpp", find_library()]
    subprocess.run([*command, *sources, "-o", program], check=True)
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == (TESTS / "answers.txt").read_text()


@pytest.mark.long
def test_aarch64_gives_the_same_answers():
    for tool in ("aarch64-linux-gnu-g++", "qemu-aarch64", "cmake"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} not found: apt-get install g++-aarch64-linux-gnu qemu-user cmake")
    done = subprocess.run(
        [TESTS / "run.sh", "aarch64"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
