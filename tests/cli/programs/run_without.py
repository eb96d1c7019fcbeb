"""Run the command line as if some packages were not installed.

python run_without.py PACKAGE,PACKAGE,... ARGUMENTS
"""

import sys

BLOCKED = set(sys.argv[1].split(","))


class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Blocker())
from slimtensors.cli import main  # noqa: E402  after the packages are blocked

sys.exit(main(sys.argv[2:]))
