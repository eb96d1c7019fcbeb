"""What the fields of modifiers may be."""

from collections.abc import Mapping, Sequence
from typing import Any

from slimtensors.errors import ConfigError
from slimtensors.pruning import Structure, parse_structure

Sparsity = float | tuple[float, ...] | Mapping[str, float]
"""The share of zeros: of every layer, of the layers of each block, or by target."""

LINEAR, OUTPUT = "Linear", "lm_head"


def names(given: Any) -> tuple[str, ...]:
    """Return targets as a tuple; one alone may be given as text."""
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(each, str) for each in found):
        raise ConfigError(f"targets are names, patterns or classes of layers, not {given!r}")
    return found


def share(value: object, name: str) -> float:
    """Return a share of zeros: a number from 0 up to, but not, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name} is a share from 0 up to 1, not {value!r}")
    return float(value)


def shares(value: object, name: str) -> Sparsity:
    """Return one share, one for each block, or one for each target."""
    if isinstance(value, Mapping):
        return {str(key): share(x, f"{name} of {key}") for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(share(x, name) for x in value)
    return share(value, name)


def positive(value: object, name: str) -> float:
    """Return a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is a number above zero, not {value!r}")
    return float(value)


def choice(value: object, name: str, known: Sequence[str]) -> str:
    """Return one of some words."""
    if value not in known:
        raise ConfigError(f"{name} is one of {', '.join(known)}, not {value!r}")
    return str(value)


def structure(text: object, sparsity: Sparsity, name: str) -> Structure:
    """Return the structure; raise if it fixes another share of zeros than the one asked for."""
    if not isinstance(text, str):
        raise ConfigError(f"mask_structure is text, as '2:4' in quotes, not {text!r}")
    found = parse_structure(text)
    each = [*sparsity.values()] if isinstance(sparsity, Mapping) else sparsity
    every = each if isinstance(each, list | tuple) else (each,)
    if found.share is not None and any(abs(x - found.share) > 1e-6 for x in every):
        raise ConfigError(
            f"mask_structure {text} keeps {text.replace(':', ' of ')}, which is a sparsity of"
            f" {found.share:g}, but {name} says {sparsity!r}"
        )
    return found
