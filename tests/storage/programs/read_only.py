"""Replace a file in a read-only folder, which must raise: python read_only.py FILE."""

import os
import sys
from pathlib import Path

from model_states import identify, save_new

path = Path(sys.argv[1])
if os.geteuid() == 0:
    os.setegid(65534)
    os.seteuid(65534)
try:
    save_new(path, "file")
except PermissionError:
    print(identify(path))
