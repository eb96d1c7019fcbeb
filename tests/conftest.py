"""What all tests need."""

import signal

# A shell starts what runs in the background with Ctrl-C ignored, and our children inherit that:
# tests that interrupt a process would wait in vain.
signal.signal(signal.SIGINT, signal.default_int_handler)
