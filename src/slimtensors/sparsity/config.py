"""What `config.json` says about a sparse model: the section `sparsity_config`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self

from slimtensors.errors import ConfigError, nearest


@dataclass(frozen=True)
class SparsityConfig:
    """How the zeros of a model are stored, and how many there are."""

    default_format: ClassVar[str] = "dense_sparsity"

    format: str = ""
    sparsity_structure: str = "unstructured"
    """`unstructured`, or how many of how many are kept: `2:4`, `8:16`."""
    global_sparsity: float = 0.0
    """The fraction of all weights that is zero. Says; does not decide."""

    def __post_init__(self) -> None:
        if not self.format:
            object.__setattr__(self, "format", self.default_format)

    def to_dict(self) -> dict[str, Any]:
        """Return the section as it stands in `config.json`."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read the section; `global_sparsity` may be text, as older files have it."""
        known = {field.name for field in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"sparsity_config has no {key!r}; {nearest(key, known)}")
        values = dict(data)
        if "global_sparsity" in values:
            values["global_sparsity"] = float(values["global_sparsity"])
        return cls(**values)


@dataclass(frozen=True)
class BitmaskConfig(SparsityConfig):
    """Nonzero values and one bit per position, for any pattern of zeros."""

    default_format: ClassVar[str] = "sparse-bitmask"


@dataclass(frozen=True)
class Sparse24BitmaskConfig(SparsityConfig):
    """Half of the values and one bit per position, where two of every four are zero."""

    default_format: ClassVar[str] = "sparse-24-bitmask"
    sparsity_structure: str = "2:4"


def parse_section(section: Mapping[str, Any]) -> SparsityConfig:
    """Read any section `sparsity_config`, leaving out what only other libraries put there."""
    kinds = (SparsityConfig, BitmaskConfig, Sparse24BitmaskConfig)
    named = {kind.default_format.replace("_", "-"): kind for kind in kinds}
    kind = named.get(str(section.get("format")).replace("_", "-"), SparsityConfig)
    known = {field.name for field in fields(kind)}
    return kind.from_dict({key: value for key, value in section.items() if key in known})
