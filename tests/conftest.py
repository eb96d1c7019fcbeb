"""What all tests need."""

import os
import signal

# Some virtual machines announce AMX and end whoever uses it, as dense products of bf16 would.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

# A shell starts what runs in the background with Ctrl-C ignored, and our children inherit that:
# tests that interrupt a process would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
