"""Modifiers: the steps of a recipe, one frozen dataclass each."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from slimtensors.errors import ConfigError
from slimtensors.layerwise.structure import Structure, parse_structure
from slimtensors.quantization import (
    ActivationOrdering,
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
)
from slimtensors.quantization.layers import find_empty_layers, find_output_layers

Sparsity = float | tuple[float, ...] | Mapping[str, float]
"""Share of zeros: one for all layers, one per block, or one per target."""

LINEAR, OUTPUT = "Linear", "lm_head"
SCHEDULES = ("cubic", "linear")

_UNSTRUCTURED = "unstructured"


@dataclass(frozen=True)
class _OneShotPruning:
    """Fields of all modifiers that prune in one shot."""

    sparsity: Sparsity = 0.5
    """Share of zeros: one for all layers, a list with one per block, or one per target."""
    mask_structure: str = _UNSTRUCTURED
    """`unstructured`, N:M like `2:4` (2 of 4 weights are kept), `rows`, or blocks like `16x16`."""
    targets: tuple[str, ...] = (LINEAR,)
    """Names, classes, or patterns of names (`re:.*mlp.*`) of layers."""
    ignore: tuple[str, ...] = (OUTPUT,)
    """Layers to leave as they are; `lm_head` is the output layer of any model, and tied layers."""

    def __post_init__(self) -> None:
        _set(self, sparsity=_check_sparsity(self.sparsity, "sparsity"))
        _set(self, targets=_check_names(self.targets), ignore=_check_names(self.ignore))
        if self.structure.name == _UNSTRUCTURED:
            _set(self, mask_structure=_UNSTRUCTURED)

    @property
    def structure(self) -> Structure:
        """Structure of the zeros."""
        return _check_structure(self.mask_structure, self.sparsity, "sparsity")


@dataclass(frozen=True)
class _CalibratedPruning(_OneShotPruning):
    """Fields of modifiers that prune with calibration data."""

    sparsity_profile: str | None = None
    """`owl`: layers with many outliers in their inputs are pruned less (Yin et al., 2023)."""
    owl_m: float = 5.0
    """Multiple of the mean from which on a value is an outlier."""
    owl_lmbda: float = 0.08
    """Half of the largest difference between the sparsities of two layers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity_profile is None:
            return
        _set(self, sparsity_profile=str(self.sparsity_profile).lower())
        _check_choice(self.sparsity_profile, "sparsity_profile", ["owl"])
        _check_positive(self.owl_m, "owl_m")
        _check_share(self.owl_lmbda, "owl_lmbda")
        if not isinstance(self.sparsity, float) or self.structure.share is not None:
            raise ConfigError(
                "sparsity_profile requires a single sparsity, and no structure like 2:4"
            )


@dataclass(frozen=True)
class MagnitudePruning(_OneShotPruning):
    """Prune the smallest weights of each layer; needs no data."""


@dataclass(frozen=True)
class Wanda(_CalibratedPruning):
    """Prune weights by magnitude times the norm of their inputs (Sun et al., 2023)."""


@dataclass(frozen=True)
class SparseGPT(_CalibratedPruning):
    """Prune column by column with error compensation (Frantar et al., 2023).

    Example:
        >>> oneshot(model, [SparseGPT(mask_structure="2:4")], dataset, output_dir="sparse")
    """

    block_size: int = 128
    """Number of columns for which zeros are chosen at a time."""
    dampening_frac: float = 0.01
    """Added to the diagonal of the Hessian, in units of its mean."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self.dampening_frac, "dampening_frac")
        if not isinstance(self.block_size, int) or self.block_size < 1:
            raise ConfigError(f"block_size must be a positive integer, got {self.block_size!r}")


@dataclass(frozen=True)
class ConstantPruning:
    """Keep the weights at zero that are zero at the start."""

    targets: tuple[str, ...] = (LINEAR,)
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _set(self, targets=_check_names(self.targets), ignore=_check_names(self.ignore))


@dataclass(frozen=True)
class NormMapping:
    """A norm, and the layers that read its outputs."""

    smooth_layer: str
    balance_layers: tuple[str, ...]

    @classmethod
    def parse(cls, value: object) -> "NormMapping":
        """Read a pair `[[layers], norm]` or a mapping, as in recipes of llm-compressor."""
        match value:
            case NormMapping():
                return value
            case {"smooth_layer": str(norm), "balance_layers": layers, **rest} if not rest:
                return cls(norm, _check_names(layers))
            case [layers, str(norm)]:
                return cls(norm, _check_names(layers))
        raise ConfigError(
            "a mapping must be [[layers], norm], or have smooth_layer and balance_layers;"
            f" got {value!r}"
        )

    @classmethod
    def parse_all(cls, values: Sequence[object] | None) -> "tuple[NormMapping, ...]":
        """Read all mappings of a modifier."""
        return tuple(cls.parse(value) for value in values or ())


@dataclass(frozen=True)
class _Quantization:
    """Fields of all modifiers that quantize."""

    scheme: str | None = None
    """Name of a scheme like `W4A16`, instead of `config_groups`."""
    config_groups: Mapping[str, QuantizationScheme] = field(default_factory=dict)
    targets: tuple[str, ...] = (LINEAR,)
    """Layers to which `scheme` applies."""
    ignore: tuple[str, ...] = (OUTPUT,)
    """Layers to leave as they are; `lm_head` is the output layer of any model, and tied layers."""
    kv_cache_scheme: QuantizationArgs | None = None

    def __post_init__(self) -> None:
        _set(self, targets=_check_names(self.targets), ignore=_check_names(self.ignore))
        if isinstance(self.kv_cache_scheme, Mapping):
            _set(self, kv_cache_scheme=QuantizationArgs.from_dict(self.kv_cache_scheme))
        if isinstance(self.scheme, Mapping):  # as in llm-compressor: targets by scheme name
            _set(self, config_groups={**self.config_groups, **self.scheme}, scheme=None)
        if (self.scheme is None) == (not self.config_groups):
            raise ConfigError("either scheme (like W4A16) or config_groups is required")
        if self.scheme is not None:
            QuantizationScheme.preset(self.scheme)
        _set(self, config_groups=QuantizationConfig({**self.config_groups}).config_groups)

    @property
    def config(self) -> QuantizationConfig:
        """Quantization config of the model, as in `config.json`."""
        groups = dict(self.config_groups)
        if self.scheme is not None:
            groups = {"group_0": QuantizationScheme.preset(self.scheme, self.targets)}
        return QuantizationConfig(
            groups, ignore=list(self.ignore), kv_cache_scheme=self.kv_cache_scheme
        )


@dataclass(frozen=True)
class Quantize(_Quantization):
    """Round weights to nearest; only static activation scales need data."""


@dataclass(frozen=True)
class GPTQ(_Quantization):
    """Round weights column by column with error compensation (Frantar et al., 2022).

    Example:
        >>> oneshot(model, [GPTQ("W4A16")], dataset, output_dir="quantized")
    """

    dampening_frac: float = 0.01
    """Added to the diagonal of the Hessian, in units of its mean."""
    actorder: ActivationOrdering | None = None
    """`weight` or `group`: round the columns with the largest inputs first."""
    static_groups: bool = True
    """Whether the scales of all groups are computed before the first column is rounded."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self.dampening_frac, "dampening_frac")
        if self.actorder is not None:
            args = QuantizationArgs(4, group_size=128, actorder=self.actorder)
            _set(self, actorder=args.actorder)

    @property
    def config(self) -> QuantizationConfig:
        """Quantization config of the model, with `actorder`."""
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
class AWQ(_Quantization):
    """Search for the scales with the smallest rounding error, then round (Lin et al., 2023)."""

    steps: int = 20
    """Number of scales to try."""
    mappings: tuple[NormMapping, ...] = ()
    """Norms to smooth, and the layers that read them; all possible ones by default."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _set(self, mappings=NormMapping.parse_all(self.mappings))


@dataclass(frozen=True)
class SmoothQuant:
    """Balance the ranges of inputs and weights for the quantizing modifier that follows."""

    smoothing_strength: float = 0.5
    """0 leaves the whole range to the inputs, 1 to the weights (Xiao et al., 2022)."""
    mappings: tuple[NormMapping, ...] = ()
    """Norms to smooth, and the layers that read them; all possible ones by default."""
    ignore: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _set(self, mappings=NormMapping.parse_all(self.mappings), ignore=_check_names(self.ignore))
        if not 0 <= self.smoothing_strength <= 1:
            raise ConfigError(
                f"smoothing_strength must be from 0 to 1, got {self.smoothing_strength!r}"
            )


@dataclass(frozen=True)
class _GradualPruning:
    """Fields of all modifiers that prune gradually during training; times are in epochs."""

    final_sparsity: float = 0.5
    init_sparsity: float = 0.0
    start: float = 0.0
    end: float | None = None
    """Time at which the final sparsity is reached; the end of training by default."""
    update_frequency: float | None = None
    """Time between two updates of the masks; one optimizer step by default."""
    schedule: str = "cubic"
    """Growth of the sparsity: `cubic` (fast at first) or `linear`."""
    mask_structure: str = _UNSTRUCTURED
    """`unstructured`, N:M like `2:4` (2 of 4 weights are kept), `rows`, or blocks like `16x16`."""
    apply_globally: bool = False
    """Whether weights are ranked across all layers instead of within each layer."""
    targets: tuple[str, ...] = (LINEAR,)
    ignore: tuple[str, ...] = (OUTPUT,)

    def __post_init__(self) -> None:
        _set(self, targets=_check_names(self.targets), ignore=_check_names(self.ignore))
        _set(self, final_sparsity=_check_share(self.final_sparsity, "final_sparsity"))
        _set(self, init_sparsity=_check_share(self.init_sparsity, "init_sparsity"))
        _check_choice(self.schedule, "schedule", SCHEDULES)
        if self.init_sparsity > self.final_sparsity:
            raise ConfigError("init_sparsity must not be above final_sparsity")
        if self.start < 0 or (self.end is not None and self.end <= self.start):
            raise ConfigError(f"end must be after start, got {self.end} and {self.start}")
        if self.update_frequency is not None:
            _check_positive(self.update_frequency, "update_frequency")
        if self.structure.name == _UNSTRUCTURED:
            _set(self, mask_structure=_UNSTRUCTURED)

    @property
    def structure(self) -> Structure:
        """Structure of the zeros."""
        return _check_structure(self.mask_structure, self.final_sparsity, "final_sparsity")


@dataclass(frozen=True)
class GradualMagnitudePruning(_GradualPruning):
    """Prune the smallest weights, more of them over time (Zhu and Gupta, 2017)."""


@dataclass(frozen=True)
class MovementPruning(_GradualPruning):
    """Prune weights that training moves towards zero (Sanh et al., 2020)."""

    score_learning_rate: float = 1e-2
    """Learning rate of the scores that decide which weights are pruned."""
    score_init: str = "zeros"
    """Initial scores: `zeros`, as in PruneBERT, or `magnitude` in units of the layer's standard
    deviation, which is better if training is too short to learn all scores."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self.score_learning_rate, "score_learning_rate")
        _check_choice(self.score_init, "score_init", ("zeros", "magnitude"))


@dataclass(frozen=True)
class Distillation:
    """Add the divergence from a teacher to the training loss."""

    teacher: str | None = None
    """Folder or name of the teacher; the model itself before training by default."""
    hardness: float = 0.5
    """Weight of the teacher in the loss, from 0 to 1."""
    temperature: float = 2.0

    def __post_init__(self) -> None:
        _check_positive(self.temperature, "temperature")
        if not 0 < self.hardness <= 1:
            raise ConfigError(f"hardness must be above 0 and at most 1, got {self.hardness!r}")


def resolve_ignore(model: nn.Module, ignore: Sequence[str]) -> list[str]:
    """Return the layers to ignore, with empty ones.

    The default `lm_head` means the model's own output layers, and a module of that name unless it
    contains one, such as `lm_head.decoder`.
    """
    names = [*ignore, *find_empty_layers(model)]
    if OUTPUT in ignore:
        outputs = find_output_layers(model)
        is_layer = any(name == OUTPUT for name, _ in model.named_modules())
        if not is_layer or any(name.startswith(f"{OUTPUT}.") for name in outputs):
            names.remove(OUTPUT)
        names += outputs
    return [*dict.fromkeys(names)]


PruningModifier = MagnitudePruning | Wanda | SparseGPT
QuantizationModifier = Quantize | GPTQ | AWQ
TrainingModifier = GradualMagnitudePruning | MovementPruning | Distillation
"""Modifiers that require `train`."""
Modifier = PruningModifier | ConstantPruning | QuantizationModifier | SmoothQuant | TrainingModifier


def _set(modifier: object, **values: Any) -> None:
    """Set fields of a frozen dataclass in `__post_init__`."""
    for name, value in values.items():
        object.__setattr__(modifier, name, value)


def _check_names(value: Any) -> tuple[str, ...]:
    """Return targets as a tuple; accept a single string."""
    names = tuple(value) if isinstance(value, list | tuple) else (value,)
    if not all(isinstance(name, str) for name in names):
        raise ConfigError(f"targets must be names, patterns or classes of layers, got {value!r}")
    return names


def _check_share(value: object, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise ConfigError(f"{name} must be at least 0 and below 1, got {value!r}")
    return float(value)


def _check_sparsity(value: object, name: str) -> Sparsity:
    """Return one share, one per block, or one per target."""
    if isinstance(value, Mapping):
        return {str(key): _check_share(x, f"{name} of {key}") for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_check_share(x, name) for x in value)
    return _check_share(value, name)


def _check_positive(value: object, name: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigError(f"{name} must be a positive number, got {value!r}")


def _check_choice(value: object, name: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


def _check_structure(text: object, sparsity: Sparsity, name: str) -> Structure:
    """Return the structure; raise if it determines another share of zeros than requested."""
    if not isinstance(text, str):
        raise ConfigError(f"mask_structure must be a string like '2:4' in quotes, got {text!r}")
    structure = parse_structure(text)
    values = [*sparsity.values()] if isinstance(sparsity, Mapping) else sparsity
    shares = values if isinstance(values, list | tuple) else (values,)
    if structure.share is not None and any(abs(x - structure.share) > 1e-6 for x in shares):
        raise ConfigError(
            f"mask_structure {text} keeps {text.replace(':', ' of ')} weights, a sparsity of"
            f" {structure.share:g}, but {name} is {sparsity!r}"
        )
    return structure
