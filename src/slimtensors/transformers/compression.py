"""Configurations for `save_pretrained(sparsity_config=…)`."""

from slimtensors.folder.config_json import BitmaskConfig, Sparse24BitmaskConfig, SparsityConfig

__all__ = ["BitmaskConfig", "Sparse24BitmaskConfig", "SparsityConfig"]
