import shutil
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "cpp" / "fuzz" / "run.sh"
INSTALL = "apt-get install clang libclang-rt-dev cmake make"


def missing():
    absent = [tool for tool in ("clang++", "cmake") if shutil.which(tool) is None]
    if absent:
        return f"{' and '.join(absent)} not found: {INSTALL}"
    probe = ["clang++", "-fsanitize=fuzzer,address,undefined", "-x", "c++", "-", "-o", "/dev/null"]
    program = 'extern "C" int LLVMFuzzerTestOneInput(const char*, unsigned long) { return 0; }'
    linked = subprocess.run(probe, input=program, capture_output=True, text=True, check=False)
    return None if linked.returncode == 0 else f"clang cannot link its fuzzer: {INSTALL}"


def test_no_input_makes_a_decoder_leave_its_buffers():
    if reason := missing():
        pytest.skip(reason)
    done = subprocess.run([RUN, "8"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("== fuzz_") == len(list(RUN.parent.glob("fuzz_*.cpp")))
