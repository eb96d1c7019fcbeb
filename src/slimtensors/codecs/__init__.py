"""Codecs, one file each. To add one, write the file and import it here."""

from slimtensors.codecs.bins import Bins
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.codecs.dense import Dense
from slimtensors.codecs.density import Density
from slimtensors.codecs.gaps import Gaps
from slimtensors.codecs.huffman import Huffman
from slimtensors.codecs.integer import Int, IntBlocks
from slimtensors.codecs.protocol import (
    Codec,
    Measured,
    RandomAccess,
    Sliceable,
    find,
    from_json,
    names,
    register,
    to_json,
)
from slimtensors.codecs.torch_quantized import TorchQuantized
from slimtensors.codecs.trellis import Trellis

__all__ = [
    "Bins",
    "Bitmask",
    "Bitmask24",
    "Codec",
    "Dense",
    "Density",
    "Gaps",
    "Huffman",
    "Int",
    "IntBlocks",
    "Measured",
    "RandomAccess",
    "Sliceable",
    "TorchQuantized",
    "Trellis",
    "find",
    "from_json",
    "names",
    "register",
    "to_json",
]
