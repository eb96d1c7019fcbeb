"""The state dict of a model with many zeros, as compressed-tensors 0.9 to 0.14 named its parts."""

import logging

from torch import Tensor, nn

from slimtensors import presets
from slimtensors.codecs import Bitmask, Bitmask24
from slimtensors.dialects import compressed_tensors
from slimtensors.errors import ConfigError
from slimtensors.plan import Plan
from slimtensors.sparsity import SparsityConfig, count_zeros
from slimtensors.spec import Json, check_storable, on_cpu

_LOG = logging.getLogger(__name__)
_CHOOSERS = {"sparse-bitmask": presets.bitmask, "sparse-24-bitmask": presets.bitmask24}


def sparse_state(model: nn.Module, config: SparsityConfig) -> tuple[dict[str, Tensor], Json]:
    """Return weights in parts and all else as it is; and the section that describes them."""
    if config.format not in _CHOOSERS:
        raise ConfigError(
            f"sparse models are stored as {' or '.join(_CHOOSERS)}, not {config.format}"
        )
    state: dict[str, Tensor] = {}
    zeros = items = 0
    tied = getattr(model, "all_tied_weights_keys", None) or {}  # which transformers does not save
    for name, given in model.state_dict().items():
        if name in tied:
            continue
        x = on_cpu(check_storable(name, given)).contiguous()
        found = count_zeros(x)
        zeros, items = zeros + found.zero, items + found.items
        codec = _codec(name, x, config.format)
        if codec is None:
            state[name] = given
            continue
        parts = compressed_tensors.split(x, codec)
        state |= {f"{name.removesuffix('.weight')}.{part}": y for part, y in parts.items()}
    section = config.to_dict() | {"global_sparsity": zeros / max(items, 1)}
    return state, section | {"targets": [], "ignore": [], "registry_requires_subclass": False}


def _codec(name: str, x: Tensor, stored: str) -> Bitmask | Bitmask24 | None:
    choice = _CHOOSERS[stored](name, x)
    if choice.plan is None:
        return None
    if not name.endswith(".weight"):
        _LOG.warning("%s: stays dense, because %s has a place for weights only", name, stored)
        return None
    assert isinstance(choice.plan, Plan)
    codec = choice.plan.codec
    assert isinstance(codec, Bitmask | Bitmask24), "the rules for these formats choose no other"
    return codec
