"""Compressed folders in transformers: importing this registers their format.

From then on `AutoModel….from_pretrained(folder)` loads them, and `save_pretrained` of such a model
writes it compressed again.
"""

from slimtensors.errors import MissingDependencyError

try:
    from transformers import core_model_loading as _needed  # noqa: F401
except ImportError as error:
    raise MissingDependencyError("transformers 5.22 or later", "transformers") from error

from slimtensors.integrations.transformers.config import SlimConfig
from slimtensors.integrations.transformers.quantizer import SlimQuantizer

__all__ = ["SlimConfig", "SlimQuantizer"]
