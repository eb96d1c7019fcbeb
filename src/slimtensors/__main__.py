"""`python -m slimtensors`."""

import sys

from slimtensors.cli import main

sys.exit(main())
