"""Weights that change: publish and follow a model, and pools of models that share tensors."""

from slimtensors.sync.decode import Patch
from slimtensors.sync.follow import Follower, Update, following
from slimtensors.sync.manifest import Version
from slimtensors.sync.members import Member
from slimtensors.sync.pool import Pool
from slimtensors.sync.publish import Published, Publisher, publishing

__all__ = [
    "Follower",
    "Member",
    "Patch",
    "Pool",
    "Published",
    "Publisher",
    "Update",
    "Version",
    "following",
    "publishing",
]
