"""Modifiers that set weights to zero, in one shot."""

from dataclasses import dataclass
from typing import Any

from slimtensors.errors import ConfigError
from slimtensors.pruning import Structure
from slimtensors.recipe.modifiers import fields
from slimtensors.recipe.modifiers.fields import LINEAR, OUTPUT, Sparsity

_UNSTRUCTURED = "unstructured"


@dataclass(frozen=True)
class _Pruning:
    """What all of them say: how many weights go, where, and from which layers."""

    sparsity: Sparsity = 0.5
    """The share of zeros: one for all layers, a list with one per block, or by target."""
    mask_structure: str = _UNSTRUCTURED
    """`unstructured`, `2:4` and the like (kept of how many), `rows`, or blocks like `16x16`."""
    targets: tuple[str, ...] = (LINEAR,)
    """Names, classes, or patterns of names (`re:.*mlp.*`) of layers."""
    ignore: tuple[str, ...] = (OUTPUT,)

    def __post_init__(self) -> None:
        _put(self, "sparsity", fields.shares(self.sparsity, "sparsity"))
        _put(self, "targets", fields.names(self.targets))
        _put(self, "ignore", fields.names(self.ignore))
        if self.structure.name == _UNSTRUCTURED:
            _put(self, "mask_structure", _UNSTRUCTURED)

    @property
    def structure(self) -> Structure:
        """Where zeros may be."""
        return fields.structure(self.mask_structure, self.sparsity, "sparsity")


@dataclass(frozen=True)
class _Profiled(_Pruning):
    """What those say that see data: which layers may lose more than others."""

    sparsity_profile: str | None = None
    """`owl`: layers whose inputs have many outliers keep more weights (Yin et al., 2023)."""
    owl_m: float = 5.0
    """How many times the mean an outlier is at least."""
    owl_lmbda: float = 0.08
    """Half of how far the sparsities of two layers may lie apart."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity_profile is None:
            return
        _put(self, "sparsity_profile", str(self.sparsity_profile).lower())
        fields.choice(self.sparsity_profile, "sparsity_profile", ["owl"])
        fields.positive(self.owl_m, "owl_m")
        fields.share(self.owl_lmbda, "owl_lmbda")
        if not isinstance(self.sparsity, float) or self.structure.share is not None:
            raise ConfigError("sparsity_profile spreads one sparsity, without a structure like 2:4")


@dataclass(frozen=True)
class MagnitudePruning(_Pruning):
    """Remove the smallest weights of each layer; needs no data."""


@dataclass(frozen=True)
class Wanda(_Profiled):
    """Remove weights that are small for how much flows into them (Sun et al., 2023)."""


@dataclass(frozen=True)
class SparseGPT(_Profiled):
    """Remove weights column by column, and let others make up for it (Frantar et al., 2023)."""

    block_size: int = 128
    """Columns of which the least important weights are chosen at a time."""
    dampening_frac: float = 0.01
    """Added to the diagonal of the Hessian, in units of its mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fields.positive(self.dampening_frac, "dampening_frac")
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"block_size is a number of columns, not {self.block_size!r}")


@dataclass(frozen=True)
class ConstantPruning:
    """Hold every weight at zero that is zero when this begins."""

    targets: tuple[str, ...] = (LINEAR,)
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _put(self, "targets", fields.names(self.targets))
        _put(self, "ignore", fields.names(self.ignore))


def _put(modifier: object, field: str, value: Any) -> None:
    object.__setattr__(modifier, field, value)
