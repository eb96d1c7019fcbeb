"""Save the old model: python save_old.py PATH KIND."""

import sys
from pathlib import Path

from model_states import save_old

save_old(Path(sys.argv[1]), sys.argv[2])
