"""Load a tensor with the codec of another package: python load_flipped.py FILE."""

import sys

import torch

import slimtensors

with slimtensors.open(sys.argv[1]) as archive:
    print(archive.info("layer.weight").codec)
    assert torch.equal(archive.get_tensor("layer.weight"), torch.eye(64))
assert slimtensors.verify(sys.argv[1])
assert slimtensors.codecs.find("acme.flip").__module__ == "acme_flip"
