"""Encode and decode tensors of many kinds; print a checksum of each stream."""

import numpy as np
from bins_samples import CONTENTS, DTYPE_NAMES, make_tensor
from strategies import same_bits

from slimtensors import _core
from slimtensors.codecs import Bins
from slimtensors.tensor import DTYPES, Spec

for name in DTYPE_NAMES:
    for kind in CONTENTS:
        x = make_tensor(np.random.default_rng(1), kind, Spec(DTYPES[name], (150, 1001)))
        parts = Bins().encode(x)
        assert same_bits(Bins().decode(parts, Spec.of(x)), x)
        print(_core.crc32c(parts["stream"]))
