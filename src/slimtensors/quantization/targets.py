"""Which group of a config a layer belongs to."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from slimtensors.errors import ConfigError
from slimtensors.quantization.scheme import QuantizationScheme

_REGEX = "re:"


def rank(target: str, name: str, classes: Sequence[str]) -> int | None:
    """Tell how closely a target fits a layer: 0 by name, 1 by pattern, 2 by class, or not.

    `classes` are the layer's class and its parents; a pattern need only fit the start of a name.
    """
    if target.startswith(_REGEX):
        return 1 if _pattern(target).match(name) else None
    if target == name:
        return 0
    return 2 if target in classes else None


def is_target(targets: Iterable[str], name: str, classes: Sequence[str]) -> bool:
    """Tell whether any target fits the layer."""
    return any(rank(target, name, classes) is not None for target in targets)


def resolve(
    groups: Mapping[str, QuantizationScheme],
    ignore: Iterable[str],
    name: str,
    classes: Sequence[str],
) -> str | None:
    """Return the group of a layer, or none.

    What is ignored has no group. Otherwise a name beats a pattern, and a pattern beats a class; two
    groups that fit equally well raise.
    """
    if is_target(ignore, name, classes):
        return None
    best: dict[int, list[str]] = {}
    for group, scheme in groups.items():
        ranks = [r for t in scheme.targets if (r := rank(t, name, classes)) is not None]
        if ranks:
            best.setdefault(min(ranks), []).append(group)
    if not best:
        return None
    found = best[min(best)]
    if len(found) > 1:
        raise ConfigError(
            f"{name}: the groups {' and '.join(sorted(found))} both claim this layer;"
            " name it in one of them, or make their patterns disjoint"
        )
    return found[0]


def disjoint(
    groups: Mapping[str, QuantizationScheme],
    layers: Mapping[str, tuple[str, Sequence[str]]],
    patterns: Mapping[str, str] | None = None,
) -> dict[str, QuantizationScheme]:
    """Return the same groups, in alphabetical order, with targets that no other group claims.

    `layers` are the quantized ones as checkpoints name them, each with its group and its classes.
    Loaders do not agree on which of two groups wins, so groups that overlap, or that do not fit a
    name, are written out: layer by layer, or with the pattern that some of these have.
    """
    unclear: set[str] = set()
    named: dict[str, set[str]] = {}
    for name, (group, classes) in layers.items():
        named.setdefault(group, set()).add((patterns or {}).get(name, name))
        claims = {g for g, scheme in groups.items() if is_target(scheme.targets, name, classes)}
        if claims != {group}:
            unclear |= claims | {group}
    return {
        group: scheme.with_targets(sorted(named[group])) if group in unclear else scheme
        for group, scheme in sorted(groups.items())
    }


@lru_cache(maxsize=4096)
def _pattern(target: str) -> re.Pattern[str]:
    try:
        return re.compile(target.removeprefix(_REGEX))
    except re.error as error:
        raise ConfigError(f"target {target!r} is not a regular expression: {error}") from error
