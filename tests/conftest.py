"""What all tests need."""

import os
import signal

# Some virtual machines announce AMX and cannot run it: a product of bf16 matrices would end the
# tests. This is read when torch is imported, here and in processes that tests start.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# Workers of pytest-xdist share the cores: more threads would only wait for each other. Tests of
# several threads set their number themselves.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell starts what runs in the background with Ctrl-C ignored, and our children inherit that:
# tests that interrupt a process would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
