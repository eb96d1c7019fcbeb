"""Save a tensor with the codec of another package: python save_flipped.py FILE."""

import sys

import torch
from acme_flip import Flip

import slimtensors

plan = slimtensors.chain(slimtensors.Bitmask(), values=Flip(7))
summary = slimtensors.save({"layer.weight": torch.eye(64)}, sys.argv[1], preset=plan)
print(summary.tensors[0].codec)
