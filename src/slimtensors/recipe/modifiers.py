"""Modifiers: one step of a recipe each, a frozen dataclass."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from slimtensors.errors import ConfigError
from slimtensors.layerwise.structure import Structure, parse_structure
from slimtensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)

Sparsity = float | tuple[float, ...] | Mapping[str, float]
"""The share of zeros: of every layer, of the layers of each block, or by target."""

LINEAR, OUTPUT = "Linear", "lm_head"


def check_names(given: Any) -> tuple[str, ...]:
    """Return targets as a tuple; one alone may be given as text."""
    found = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not all(isinstance(each, str) for each in found):
        raise ConfigError(f"targets are names, patterns or classes of layers, not {given!r}")
    return found


def check_share(value: object, name: str) -> float:
    """Return a share of zeros: a number from 0 up to, but not, 1."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name} is a share from 0 up to 1, not {value!r}")
    return float(value)


def check_shares(value: object, name: str) -> Sparsity:
    """Return one share, one for each block, or one for each target."""
    if isinstance(value, Mapping):
        return {str(key): check_share(x, f"{name} of {key}") for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(check_share(x, name) for x in value)
    return check_share(value, name)


def check_positive(value: object, name: str) -> float:
    """Return a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} is a number above zero, not {value!r}")
    return float(value)


def check_choice(value: object, name: str, known: Sequence[str]) -> str:
    """Return one of some words."""
    if value not in known:
        raise ConfigError(f"{name} is one of {', '.join(known)}, not {value!r}")
    return str(value)


def check_structure(text: object, sparsity: Sparsity, name: str) -> Structure:
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
        _put_pruning(self, "sparsity", check_shares(self.sparsity, "sparsity"))
        _put_pruning(self, "targets", check_names(self.targets))
        _put_pruning(self, "ignore", check_names(self.ignore))
        if self.structure.name == _UNSTRUCTURED:
            _put_pruning(self, "mask_structure", _UNSTRUCTURED)

    @property
    def structure(self) -> Structure:
        """Where zeros may be."""
        return check_structure(self.mask_structure, self.sparsity, "sparsity")


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
        _put_pruning(self, "sparsity_profile", str(self.sparsity_profile).lower())
        check_choice(self.sparsity_profile, "sparsity_profile", ["owl"])
        check_positive(self.owl_m, "owl_m")
        check_share(self.owl_lmbda, "owl_lmbda")
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
        check_positive(self.dampening_frac, "dampening_frac")
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"block_size is a number of columns, not {self.block_size!r}")


@dataclass(frozen=True)
class ConstantPruning:
    """Hold every weight at zero that is zero when this begins."""

    targets: tuple[str, ...] = (LINEAR,)
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _put_pruning(self, "targets", check_names(self.targets))
        _put_pruning(self, "ignore", check_names(self.ignore))


def _put_pruning(modifier: object, field: str, value: Any) -> None:
    object.__setattr__(modifier, field, value)


@dataclass(frozen=True)
class Mapped:
    """A norm, and the layers that read it."""

    smooth_layer: str
    balance_layers: tuple[str, ...]

    @classmethod
    def of(cls, given: object) -> "Mapped":
        """Read either form in which others write it."""
        match given:
            case Mapped():
                return given
            case {"smooth_layer": str(norm), "balance_layers": layers, **rest} if not rest:
                return cls(norm, check_names(layers))
            case [layers, str(norm)]:
                return cls(norm, check_names(layers))
        raise ConfigError(
            f"a mapping is [[layers that read a norm], norm], or smooth_layer and balance_layers;"
            f" not {given!r}"
        )


@dataclass(frozen=True)
class _Quantizing:
    """What all of them say: which layers are quantized, and how."""

    scheme: str | None = None
    """A name like `W4A16`; or else, `config_groups`."""
    config_groups: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    targets: tuple[str, ...] = (LINEAR,)
    """Layers that `scheme` is for."""
    ignore: tuple[str, ...] = (OUTPUT,)
    kv_cache_scheme: QuantizationArgs | None = None

    def __post_init__(self) -> None:
        _put_quantizing(self, "targets", check_names(self.targets))
        _put_quantizing(self, "ignore", check_names(self.ignore))
        if isinstance(self.kv_cache_scheme, Mapping):
            _put_quantizing(
                self, "kv_cache_scheme", QuantizationArgs.from_dict(self.kv_cache_scheme)
            )
        if isinstance(self.scheme, Mapping):  # as others allow: targets by the name of a scheme
            _put_quantizing(self, "config_groups", {**self.config_groups, **self.scheme})
            _put_quantizing(self, "scheme", None)
        if (self.scheme is None) == (not self.config_groups):
            raise ConfigError("needs a scheme like W4A16, or config_groups, and not both")
        if self.scheme is not None:
            QuantizationScheme.preset(self.scheme)
        _put_quantizing(
            self, "config_groups", QuantizationConfig({**self.config_groups}).config_groups
        )

    @property
    def config(self) -> QuantizationConfig:
        """What `config.json` would say."""
        groups = dict(self.config_groups)
        if self.scheme is not None:
            groups = {"group_0": QuantizationScheme.preset(self.scheme, self.targets)}
        return QuantizationConfig(
            groups, ignore=list(self.ignore), kv_cache_scheme=self.kv_cache_scheme
        )


@dataclass(frozen=True)
class Quantize(_Quantizing):
    """Round weights to nearest; data is needed only for static scales of activations."""


@dataclass(frozen=True)
class GPTQ(_Quantizing):
    """Round weights column by column, and let others make up for it (Frantar et al., 2022)."""

    dampening_frac: float = 0.01
    """Added to the diagonal of the Hessian, in units of its mean."""
    actorder: ActivationOrdering | None = None
    """`weight` or `group`: round the columns first into which most flows."""
    static_groups: bool = True
    """Whether the scales of all groups are found before the first column is rounded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.dampening_frac, "dampening_frac")
        if self.actorder is not None:
            args = QuantizationArgs(4, group_size=128, actorder=self.actorder)
            _put_quantizing(self, "actorder", args.actorder)

    @property
    def config(self) -> QuantizationConfig:
        """What `config.json` would say, with the order of columns."""
        config = super().config
        if self.actorder is None:
            return config
        ordered = {
            name: replace(group, weights=replace(group.weights, actorder=self.actorder))
            for name, group in config.config_groups.items()
            if group.weights is not None
        }
        return replace(config, config_groups=config.config_groups | ordered)


@dataclass(frozen=True)
class AWQ(_Quantizing):
    """Scale weights so that rounding to nearest does least harm, then round (Lin et al., 2023)."""

    steps: int = 20
    """How many scales are tried."""
    mappings: tuple[Mapped, ...] = ()
    """Norms to smooth, with who reads them; by default all that can be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _put_quantizing(self, "mappings", _mappings(self.mappings))


@dataclass(frozen=True)
class SmoothQuant:
    """Share large inputs between inputs and weights, for the quantizing modifier that follows."""

    smoothing_strength: float = 0.5
    """0 leaves it all to the inputs, 1 to the weights (Xiao et al., 2022)."""
    mappings: tuple[Mapped, ...] = ()
    """Norms to smooth, with who reads them; by default all that can be."""
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _put_quantizing(self, "mappings", _mappings(self.mappings))
        _put_quantizing(self, "ignore", check_names(self.ignore))
        if not 0 <= self.smoothing_strength <= 1:
            raise ConfigError(f"smoothing_strength is from 0 to 1, not {self.smoothing_strength!r}")


def _mappings(given: Sequence[object] | None) -> tuple[Mapped, ...]:
    return tuple(Mapped.of(each) for each in given or ())


def _put_quantizing(modifier: object, field: str, value: Any) -> None:
    object.__setattr__(modifier, field, value)


SCHEDULES = ("cubic", "linear")


@dataclass(frozen=True)
class _Gradual:
    """What all say that prune little by little; times are in epochs."""

    final_sparsity: float = 0.5
    init_sparsity: float = 0.0
    start: float = 0.0
    end: float | None = None
    """When the final sparsity is reached; by default, when training ends."""
    update_frequency: float | None = None
    """Time from one choice of zeros to the next; by default, every step of the optimizer."""
    schedule: str = "cubic"
    """How sparsity grows: `cubic`, fast at first, or `linear`."""
    mask_structure: str = "unstructured"
    """`unstructured`, `2:4` and the like (kept of how many), `rows`, or blocks like `16x16`."""
    apply_globally: bool = False
    """Whether weights are compared with those of all layers, not only of their own."""
    targets: tuple[str, ...] = (LINEAR,)
    ignore: tuple[str, ...] = (OUTPUT,)

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "targets", check_names(self.targets))
        put(self, "ignore", check_names(self.ignore))
        put(self, "final_sparsity", check_share(self.final_sparsity, "final_sparsity"))
        put(self, "init_sparsity", check_share(self.init_sparsity, "init_sparsity"))
        check_choice(self.schedule, "schedule", SCHEDULES)
        if self.init_sparsity > self.final_sparsity:
            raise ConfigError("init_sparsity is above final_sparsity; weights do not come back")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ConfigError(f"end {self.end} does not come after start {self.start}")
        if self.update_frequency is not None:
            check_positive(self.update_frequency, "update_frequency")
        if self.structure.name == "unstructured":
            put(self, "mask_structure", "unstructured")

    @property
    def structure(self) -> Structure:
        """Where zeros may be."""
        return check_structure(self.mask_structure, self.final_sparsity, "final_sparsity")


@dataclass(frozen=True)
class GradualMagnitudePruning(_Gradual):
    """Remove the smallest weights, a few more at a time (Zhu and Gupta, 2017)."""


@dataclass(frozen=True)
class MovementPruning(_Gradual):
    """Remove weights that training moves towards zero (Sanh et al., 2020)."""

    score_learning_rate: float = 1e-2
    """How fast the scores are learned that decide which weights go."""
    score_init: str = "zeros"
    """What scores begin with: `zeros`, as PruneBERT's, or `magnitude`, in units of the layer's
    standard deviation: better where training is too short to learn them all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.score_learning_rate, "score_learning_rate")
        check_choice(self.score_init, "score_init", ("zeros", "magnitude"))


@dataclass(frozen=True)
class Distillation:
    """Learn also from what a teacher says, by default the model itself before training."""

    teacher: str | None = None
    """A folder or a name; by default, the model as it comes in."""
    hardness: float = 0.5
    """How much of the loss is the teacher's, from 0 to 1."""
    temperature: float = 2.0

    def __post_init__(self) -> None:
        check_positive(self.temperature, "temperature")
        if not 0 < self.hardness <= 1:
            raise ConfigError(f"hardness is a share above 0 and up to 1, not {self.hardness!r}")


Pruning = MagnitudePruning | Wanda | SparseGPT
Quantizing = Quantize | GPTQ | AWQ
Training = GradualMagnitudePruning | MovementPruning | Distillation
"""What only `train` can do."""
Modifier = Pruning | ConstantPruning | Quantizing | SmoothQuant | Training

__all__ = [
    "AWQ",
    "GPTQ",
    "ConstantPruning",
    "Distillation",
    "GradualMagnitudePruning",
    "MagnitudePruning",
    "Mapped",
    "Modifier",
    "MovementPruning",
    "Pruning",
    "Quantize",
    "Quantizing",
    "SmoothQuant",
    "SparseGPT",
    "Sparsity",
    "Training",
    "Wanda",
]
