"""Save the sample tensors: python save_sample.py FILE DIALECT THREADS."""

import sys

from reliability_tools import sample

import slimtensors

slimtensors.save(sample(), sys.argv[1], dialect=sys.argv[2], threads=int(sys.argv[3]))
