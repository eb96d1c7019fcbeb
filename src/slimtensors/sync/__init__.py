"""Weights that change: pools of models that share tensors."""

from slimtensors.sync.members import Member
from slimtensors.sync.pool import Pool

__all__ = ["Member", "Pool"]
