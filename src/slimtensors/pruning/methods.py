"""The ways to choose which weights of one matrix go."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from torch import Tensor

from slimtensors.errors import ConfigError
from slimtensors.pruning.sparsegpt import sparsegpt
from slimtensors.pruning.structure import Structure, Unstructured
from slimtensors.quantization.algorithms.hessian import Tell

Round = Callable[[Tensor, int], Tensor]
"""Returns what a column of a quantized weight becomes: numbers that its codes can mean."""


@dataclass(frozen=True)
class Wanted:
    """What is to become of one matrix."""

    share: float
    """Of zeros."""
    structure: Structure = field(default_factory=Unstructured)
    held: Tensor | None = None
    """Where zeros are that must stay."""
    round: Round | None = None
    """For a weight that is quantized already."""


class Method(Protocol):
    """A way to prune one matrix; its fields are its options."""

    name: ClassVar[str]

    @property
    def needs_inputs(self) -> bool:
        """Whether it has to see what flows into a layer."""
        ...

    def prune(self, weight: Tensor, hessian: Tensor | None, want: Wanted, *, tell: Tell) -> Tensor:
        """Return the weight with its zeros."""
        ...


@dataclass(frozen=True)
class Magnitude:
    """The smallest weights of a layer go."""

    name: ClassVar[str] = "magnitude"
    needs_inputs: bool = False
    """Only to tell what pruning does to outputs."""

    def prune(self, weight: Tensor, hessian: Tensor | None, want: Wanted, *, tell: Tell) -> Tensor:
        """Look at nothing but the weight."""
        return without(weight, want.structure.zeros(weight.abs().float(), want.share), want.held)


@dataclass(frozen=True)
class Wanda:
    """Weights of each output go that change it least, each for itself (Sun et al., 2023)."""

    name: ClassVar[str] = "wanda"
    needs_inputs: ClassVar[bool] = True

    def prune(self, weight: Tensor, hessian: Tensor | None, want: Wanted, *, tell: Tell) -> Tensor:
        """Look at the size of the inputs."""
        assert hessian is not None, "it needs inputs"
        scores = weight.abs().float() * hessian.diagonal().sqrt()
        return without(weight, want.structure.zeros(scores, want.share, per_row=True), want.held)


@dataclass(frozen=True)
class SparseGPT:
    """Weights go column by column, and those after them make up for it (Frantar, 2023)."""

    name: ClassVar[str] = "sparsegpt"
    needs_inputs: ClassVar[bool] = True
    block_size: int = 128
    damping: float = 0.01

    def prune(self, weight: Tensor, hessian: Tensor | None, want: Wanted, *, tell: Tell) -> Tensor:
        """Look at how inputs hang together."""
        assert hessian is not None, "it needs inputs"
        return sparsegpt(
            weight,
            hessian,
            want.share,
            structure=want.structure,
            held=want.held,
            block_size=self.block_size,
            damping=self.damping,
            round_column=want.round,
            tell=tell,
        )


def without(weight: Tensor, zeros: Tensor, held: Tensor | None) -> Tensor:
    """Return a weight with zeros, those that were held among them."""
    return weight.masked_fill(zeros if held is None else zeros | held, 0.0)


def check(weight: Tensor, want: Wanted) -> None:
    """Raise if a weight cannot be pruned as wanted."""
    want.structure.check(*weight.shape)
    if not weight.isfinite().all():
        raise ConfigError("NaN or infinity among its weights")
