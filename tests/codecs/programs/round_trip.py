"""Save and load a tensor: python round_trip.py FILE."""

import sys

import torch

import slimtensors

slimtensors.save({"x": torch.eye(64)}, sys.argv[1])
slimtensors.load(sys.argv[1])
