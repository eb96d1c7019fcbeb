"""Encode items of many kinds; print a checksum of each part."""

import numpy as np
from huffman_samples import CONTENTS, KINDS, encode, make_bytes

from slimtensors import _core

for itemsize, rotated in KINDS:
    for content in CONTENTS:
        items = make_bytes(np.random.default_rng(1), content, itemsize * 150_001)
        print(*(_core.crc32c(part) for part in encode(items, itemsize, rotated)))
