"""Read a file with an unknown codec and print the errors: python unknown_codec.py FILE."""

import sys

import slimtensors
from slimtensors.errors import UnknownCodecError

for read in (slimtensors.load, slimtensors.inspect):
    try:
        read(sys.argv[1])
    except UnknownCodecError as error:
        print(error)
