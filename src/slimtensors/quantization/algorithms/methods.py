"""The ways to choose codes, by name."""

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor

from slimtensors.errors import ConfigError, nearest
from slimtensors.quantization.algorithms.gptq import gptq
from slimtensors.quantization.algorithms.hessian import Tell
from slimtensors.quantization.algorithms.rtn import Rounded, rtn
from slimtensors.quantization.args import QuantizationArgs


class Method(Protocol):
    """A way to choose the codes of one matrix; its fields are its options."""

    name: ClassVar[str]

    @property
    def needs_inputs(self) -> bool:
        """Whether it has to see what flows into a layer."""
        ...

    def round(
        self, weight: Tensor, hessian: Tensor | None, args: QuantizationArgs, *, tell: Tell
    ) -> Rounded:
        """Return the weight on its grid; zeros stay zeros."""
        ...


@dataclass(frozen=True)
class RTN:
    """Round to nearest."""

    name: ClassVar[str] = "rtn"
    needs_inputs: bool = False
    """Only to tell what rounding does to outputs."""

    def round(
        self, weight: Tensor, hessian: Tensor | None, args: QuantizationArgs, *, tell: Tell
    ) -> Rounded:
        """Round each weight for itself."""
        return rtn(weight, args)


@dataclass(frozen=True)
class GPTQ:
    """Round column by column, making up for errors; the order is `args.actorder`."""

    name: ClassVar[str] = "gptq"
    needs_inputs: ClassVar[bool] = True
    damping: float = 0.01
    static_groups: bool = True

    def round(
        self, weight: Tensor, hessian: Tensor | None, args: QuantizationArgs, *, tell: Tell
    ) -> Rounded:
        """Round so that outputs change least."""
        assert hessian is not None, "it needs inputs"
        mask = weight != 0
        return gptq(
            weight,
            hessian,
            args,
            mask=None if mask.all() else mask,
            damping=self.damping,
            static_groups=self.static_groups,
            tell=tell,
        )


METHODS: dict[str, Method] = {"rtn": RTN(), "gptq": GPTQ()}


def find_method(method: str | Method) -> Method:
    """Return the method of this name."""
    if not isinstance(method, str):
        return method
    if method not in METHODS:
        raise ConfigError(f"there is no method {method!r}; {nearest(method, METHODS)}")
    return METHODS[method]
