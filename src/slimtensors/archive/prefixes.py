"""Match the tensors of two models whose names may differ by a prefix."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from slimtensors.tensor import Spec

_MAX_PARTS = 3
"""Maximum number of components of a prefix, such as `module.`, `_orig_mod.` and `model.`."""


@dataclass(frozen=True)
class PrefixMatch:
    """Tensors that are matched although their names begin differently."""

    new: str
    """Prefix in the new model, or empty."""
    base: str
    """Prefix in the base, or empty."""
    tensors: int

    def __str__(self) -> str:
        prefix, side = (self.new, "new model") if self.new else (self.base, "base")
        return f"{self.tensors} without the prefix {prefix!r} of the {side}"


def match_names(
    new: Mapping[str, Spec], base: Mapping[str, Spec]
) -> tuple[dict[str, str], list[PrefixMatch]]:
    """Return {name: name in the base} for tensors of equal dtype and shape, and the prefixes used.

    Equal names come first, then the prefixes with most bytes. No tensor of the base is used twice.
    """
    found = {name: name for name, spec in new.items() if base.get(name) == spec}
    free = base.keys() - found.values()
    left = {name: spec for name, spec in new.items() if name not in found}
    if not left or not free:
        return found, []
    votes: Counter[tuple[str, str]] = Counter()
    for name, spec in left.items():
        for prefix, rest in _split(name):
            if rest in free and base[rest] == spec:
                votes[prefix, ""] += spec.nbytes + 1
    for name in sorted(free):
        for prefix, rest in _split(name):
            if rest in left and base[name] == left[rest]:
                votes["", prefix] += base[name].nbytes + 1
    prefixes = []
    for (mine, theirs), _ in sorted(votes.items(), key=lambda vote: (-vote[1], vote[0])):
        count = 0
        for name in [name for name in left if name.startswith(mine)]:
            home = theirs + name.removeprefix(mine)
            if home in free and base[home] == left[name]:
                found[name] = home
                free.remove(home)
                del left[name]
                count += 1
        if count:
            prefixes.append(PrefixMatch(mine, theirs, count))
    return {name: found[name] for name in new if name in found}, prefixes


def _split(name: str) -> list[tuple[str, str]]:
    """Return the name divided into a prefix and the rest, in all ways."""
    parts = name.split(".")
    return [
        (".".join(parts[:i]) + ".", ".".join(parts[i:]))
        for i in range(1, min(_MAX_PARTS, len(parts) - 1) + 1)
    ]
