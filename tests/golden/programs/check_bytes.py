"""Decode golden files and write some again: python check_bytes.py; fails if any bit differs.

Prints the instruction set of the kernels.
"""

import tempfile
from pathlib import Path

from golden.slim import make
from golden.slim.expected import describe, read_expected

import slimtensors
from slimtensors import _core

FOLDER = Path(make.__file__).parent / "1"
CODECS = ("masks", "coded", "long", "quantized")

for name in CODECS:
    found = describe(slimtensors.load(FOLDER / "codecs" / f"{name}.safetensors"))
    assert found == read_expected(FOLDER / "codecs" / f"expected-{name}.json"), name

with tempfile.TemporaryDirectory() as folder:
    for name in ("slim/coded", "slim/rounded", "slim/bitmask", "slim/bitmask24", "slim/trees"):
        target = Path(folder) / "again.safetensors"
        make.write(name, target)
        assert target.read_bytes() == make.target(FOLDER, name).read_bytes(), name
        target.unlink()
print(_core.cpu())
