"""Filters: which tensors of a training state may be stored with less precision."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

from slimtensors.checkpoint.roles import WEIGHTS, About
from slimtensors.errors import ConfigError, nearest

Predicate = Callable[[About], bool]


@dataclass(frozen=True)
class Filter:
    """Choose tensors of which every given condition holds; without any, all.

    One-dimensional tensors, integers and random states are never chosen: they are always exact.
    """

    names: tuple[str, ...] = ()
    """Globs over the names of tensors: `model.*.mlp.*`."""
    modules: tuple[str, ...] = ()
    """Parts of the model, `encoder.layer.0`: their weights, and what the optimizer has for them."""
    roles: tuple[str, ...] = ()
    """`weights`, `exp_avg`, `exp_avg_sq`, `buffers`, `embeddings`, `norms`."""
    skip: tuple[str, ...] = ()
    """Globs over the names of tensors that are not to be chosen."""
    where: Predicate | None = None
    """Gets what is known of a tensor, and decides."""

    def __call__(self, about: About) -> bool:
        """Tell whether a tensor is chosen."""
        return (
            about.is_matrix
            and (not self.names or _matches(about.name, self.names))
            and (not self.modules or any(_is_in(about.parameter, path) for path in self.modules))
            and (not self.roles or not about.roles.isdisjoint(self.roles))
            and not _matches(about.name, self.skip)
            and (self.where is None or self.where(about))
        )


WEIGHT_MATRICES = Filter(roles=(WEIGHTS,))


def chosen(lossy: Filter, abouts: Mapping[str, About]) -> set[str]:
    """Return the names of the chosen tensors; raise if a condition can never hold."""
    everything = list(abouts.values())
    names = [about.name for about in everything]
    for glob in (*lossy.names, *lossy.skip):
        if not any(fnmatchcase(name, glob) for name in names):
            raise ConfigError(f"no tensor is called {glob!r}; {nearest(glob, names[:500])}")
    for path in lossy.modules:
        if not any(_is_in(about.parameter, path) for about in everything):
            raise ConfigError(f"the checkpoint knows no module {path!r}")
    known = {role for about in everything for role in about.roles}
    for role in lossy.roles:
        if role not in known:
            raise ConfigError(f"no tensor has the role {role!r}; {nearest(role, known)}")
    return {about.name for about in everything if lossy(about)}


def _matches(name: str, globs: Iterable[str]) -> bool:
    return any(fnmatchcase(name, glob) for glob in globs)


def _is_in(parameter: str, path: str) -> bool:
    return parameter == path or parameter.startswith(f"{path}.")
