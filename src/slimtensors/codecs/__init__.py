"""Codecs: one file each. To add one, write the file and name it here."""

from slimtensors.codecs.bins import Bins
from slimtensors.codecs.bitmask import Bitmask
from slimtensors.codecs.bitmask24 import Bitmask24
from slimtensors.codecs.dense import Dense
from slimtensors.codecs.density import Density
from slimtensors.codecs.gaps import Gaps
from slimtensors.codecs.huffman import Huffman
from slimtensors.codecs.integer import Int, IntBlocks
from slimtensors.codecs.protocol import (
    Chunked,
    Codec,
    Cut,
    Divisible,
    Into,
    Measured,
    Ranged,
    as_chunked,
    as_into,
    find,
    from_json,
    names,
    register,
    to_json,
)
from slimtensors.codecs.torch_quantized import TorchQuantized

__all__ = [
    "Bins",
    "Bitmask",
    "Bitmask24",
    "Chunked",
    "Codec",
    "Cut",
    "Dense",
    "Density",
    "Divisible",
    "Gaps",
    "Huffman",
    "Int",
    "IntBlocks",
    "Into",
    "Measured",
    "Ranged",
    "TorchQuantized",
    "as_chunked",
    "as_into",
    "find",
    "from_json",
    "names",
    "register",
    "to_json",
]
