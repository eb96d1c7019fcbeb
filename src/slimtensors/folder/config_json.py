"""`config.json` of a model folder: read it, edit it, and interpret the sections about weights.

The sections are `quantization_config`, `compression_config` (its name in old compressed-tensors)
and `sparsity_config`.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path, PurePath
from typing import Any, ClassVar, Self

import torch

from slimtensors.archive.originals import pack_text, text_limit, unpack_text
from slimtensors.archive.summary import Summary
from slimtensors.codecs.statistics import Sparsity, merge
from slimtensors.errors import ConfigError, CorruptFileError, report_malformed, suggest
from slimtensors.quantization import QuantizationConfig
from slimtensors.storage import Location, StrPath, locate, read_bytes, weight_files, write_json
from slimtensors.tensor import Json, dtype_name, find_dtype

CONFIG = "config.json"
QUANTIZATION_REPORT = "quantization_report.json"
"""File of a quantized folder that lists the linear layers that stay dense."""
FIT_REPORT = "fit_report.json"
"""File of a folder that was fitted to a budget: sizes and divergence of its tensors."""
VERSION = 1
"""Version of our section for model folders."""
CHECKPOINT_VERSION = 2
"""Version of our section for training checkpoints."""
METHOD = "slimtensors"
"""`quant_method` of folders that only slimtensors reads."""
COMPRESSED_TENSORS = "compressed-tensors"
"""`quant_method` of folders that compressed-tensors reads."""
FORMER_METHODS = ("sparseml", "compressed_tensors")
"""Names that SparseML and early tools gave to the `quant_method` of compressed-tensors."""

_QUANTIZATION_KEYS = ("quantization_config", "compression_config")
_SPARSITY_KEY = "sparsity_config"
SECTIONS = (*_QUANTIZATION_KEYS, _SPARSITY_KEY)
"""Keys of all sections about weights."""
_ORIGINAL = "original"
"""Key of our section: the text of `config.json` before compression, compressed."""
HOW_TO_LOAD = (
    "Run `import slimtensors.transformers` before from_pretrained, or write the plain files again"
    " with `slimtensors decompress`."
)
"""Note in our section for users who load a compressed folder without slimtensors."""

_STOP_KEY = "transformers_weights"
"""Key of `config.json`: the file of weights that transformers loads, and never saves again.

Weights in parts have other names than those of the model, so that a loader that does not support
them would use random weights. A sentence in place of a file name stops it.
"""
_LOAD_PARTS = (
    "sparse weights in parts: load them with SparseAutoModel of slimtensors.transformers, or write"
    " the plain files again with `slimtensors decompress`"
)
_SPARSE_ONLY = {"quant_method", "version", _SPARSITY_KEY, "transform_config", "before"}
"""Keys of a section of compressed-tensors for weights that are sparse but not quantized."""

Edit = Callable[[Json], Json]
"""Returns the new content of `config.json`."""


def read_config(source: StrPath | Location) -> Json:
    """Return the content of `config.json` in a folder or beside a file; empty if not found."""
    folder = resolve_folder(locate(source) if isinstance(source, str | os.PathLike) else source)
    if CONFIG not in folder.files():
        return {}
    file = folder.child(CONFIG)
    with report_malformed(str(file), ConfigError):
        return _parse(file.read())


def update_config(folder: Path, edit: Edit) -> None:
    """Rewrite `config.json`, if it exists and `edit` changes it."""
    path = folder / CONFIG
    if not path.exists():
        return
    with report_malformed(str(path), ConfigError):
        config = _parse(read_bytes(path))
        edited = edit(config)
    if edited != config:
        write_json(path, edited)


def edit_config_text(text: bytes, edit: Edit, path: str = CONFIG) -> bytes:
    """Return the edited text of a `config.json`; the same bytes if `edit` changes nothing.

    A section of ours keeps the text from before compression, unless our own form of it is equal.
    """
    with report_malformed(path, ConfigError):
        config = _parse(text)
        edited = edit(config)
        if _is_same(edited, config):
            return text
        original = _find_original(config, text)
        if original is not None:
            if _is_same(edited, _parse(original)):
                return original
            edited = _keep_original(edited, original)
        return to_json_text(edited)


def _is_same(a: Json, b: Json) -> bool:
    """Return True if two documents have equal values of equal types, in any order of keys."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


def _find_original(config: Json, text: bytes) -> bytes | None:
    """Return the text from before compression; None if it is not stored or was edited since."""
    before = remove_compression(config)
    if _is_same(before, config):
        return text
    packed = read_quantization_section(config).get(_ORIGINAL)
    if packed is None:
        return None
    try:
        original = unpack_text(str(packed), text_limit(len(text)))
    except CorruptFileError as error:
        raise ConfigError(f"{CONFIG}: {_ORIGINAL}: {error}") from error
    return original if _is_same(_parse(original), before) else None


def _keep_original(config: Json, original: bytes) -> Json:
    """Return `config` with the text from before compression in our section, if it is needed."""
    section = read_quantization_section(config)
    before = remove_compression(config)
    is_ours = section.get("quant_method") == METHOD and _is_same(before, _parse(original))
    if not is_ours or to_json_text(before) == original:
        return config
    packed = pack_text(original)
    if len(original) > text_limit(len(packed)):
        return config
    return set_section(config, {**section, _ORIGINAL: packed})


def to_json_text(data: Json) -> bytes:
    """Return JSON as it is written into model folders."""
    return (json.dumps(data, indent=2, ensure_ascii=False) + "\n").encode()


def resolve_folder(location: Location) -> Location:
    """Return a folder itself, or the folder of a file."""
    return location if location.is_folder() else location.parent()


def find_other_files(location: Location) -> dict[str, Location]:
    """Return all files except weights, their index and hidden files, by relative path.

    `.gitattributes` is part of models on a hub. Other hidden files belong to programs, or are
    private.
    """
    weights, folder = set(weight_files(location)), resolve_folder(location)
    return {
        name: folder.child(name)
        for name in folder.walk()
        if name not in weights and (name == ".gitattributes" or not _is_hidden(name))
    }


def _is_hidden(name: str) -> bool:
    return any(part.startswith(".") for part in PurePath(name).parts)


def read_quantization_sections(config: Json) -> dict[str, Json]:
    """Return the sections `quantization_config` and `compression_config`, if present, by key."""
    sections = {key: config.get(key) for key in _QUANTIZATION_KEYS}
    return {key: section for key, section in sections.items() if isinstance(section, dict)}


def read_quantization_section(config: Json) -> Json:
    """Return the section that describes how weights are stored; empty if there is none."""
    return next(filter(None, read_quantization_sections(config).values()), {})


def read_method(section: Json) -> str:
    """Return the `quant_method` of a section, `compressed-tensors` for its former names."""
    method = str(section.get("quant_method") or COMPRESSED_TENSORS)
    return COMPRESSED_TENSORS if method in FORMER_METHODS else method


def read_sparsity_section(config: Json) -> Json:
    """Return `sparsity_config`, at the top level or in another section; empty if not found."""
    for data in (config, read_quantization_section(config)):
        if isinstance(section := data.get(_SPARSITY_KEY), dict) and section:
            return section
    return {}


def remove_sections(config: Json) -> Json:
    """Return `config` without any section that describes weights."""
    kept = {key: value for key, value in config.items() if key not in SECTIONS}
    if stops_other_loaders(config.get(_STOP_KEY)):
        del kept[_STOP_KEY]
    return kept


def stop_other_loaders(config: Json, sentence: str = _LOAD_PARTS) -> Json:
    """Return `config` with the key that stops loaders that do not support weights in parts."""
    return {**config, _STOP_KEY: sentence}


def stops_other_loaders(weights: object) -> bool:
    """Return True if `transformers_weights` of a config is our sentence, not a file name."""
    return isinstance(weights, str) and "slimtensors" in weights and " " in weights


def replace_sections(config: Json, section: Json) -> Json:
    """Return `config` with all sections replaced by one `quantization_config`."""
    return set_section(remove_sections(config), section)


def set_section(config: Json, section: Json) -> Json:
    """Return `config` with `section` as `quantization_config`."""
    return {**config, _QUANTIZATION_KEYS[0]: section}


def copy_sections(config: Json, source: Json) -> Json:
    """Return `config` with the sections of `source`, and with its order of keys."""
    copied = (*SECTIONS, _STOP_KEY) if stops_other_loaders(source.get(_STOP_KEY)) else SECTIONS
    merged = config | {key: source[key] for key in copied if key in source}
    return {key: merged[key] for key in (*source, *merged) if key in merged}


def add_section(config: Json, section: Json) -> Json:
    """Return `config` with `section` as `quantization_config`, which keeps the previous ones."""
    before = {key: config[key] for key in SECTIONS if key in config}
    if before:
        section = {**section, "before": before}  # for `remove_compression`
    return set_section(config, section)


def add_sparsity_section(config: Json, sparsity: "SparsityConfig") -> Json:
    """Return `config` with this `sparsity_config`, in the spelling of SparseML."""
    return {**config, _SPARSITY_KEY: sparsity.to_section()}


def describe_compression(
    config: Json,
    summary: Summary,
    sparsity: Mapping[str, Sparsity],
    *,
    preset: str,
    dialect: str,
    method: str | None = None,
) -> Json:
    """Return `config` with the sections that describe compressed weights.

    `method` is the `quant_method`, which decides what loads the folder; by default that of the
    dialect.
    """
    codecs = Counter(t.codec for t in summary.tensors if t.codec not in ("plain", "tied"))
    if not codecs:
        return config
    overall = merge(sparsity.values())
    kinds = {codec.partition("(")[0] for codec in codecs}
    share = round(overall.share, 4)
    sparsity_config = (
        Sparse24BitmaskConfig(global_sparsity=share)
        if kinds == {"bitmask24"}
        else BitmaskConfig(sparsity_structure=overall.structure, global_sparsity=share)
    )
    in_parts = dialect == COMPRESSED_TENSORS
    if method is None:
        method = COMPRESSED_TENSORS if in_parts else METHOD
    if method == COMPRESSED_TENSORS:
        section: Json = {"quant_method": method, _SPARSITY_KEY: sparsity_config.to_dict()}
    else:
        section = {
            "quant_method": METHOD,
            "version": VERSION,
            "preset": preset,
            "dtype": _main_dtype(summary),
            "codecs": dict(sorted(codecs.items())),
            "bits_per_weight": round(8 * summary.stored_bytes / overall.items, 3),
            "how_to_load": HOW_TO_LOAD,
        }
    config = add_section(config, section)
    if in_parts:
        config = stop_other_loaders(config, HOW_TO_LOAD if method == METHOD else _LOAD_PARTS)
    is_sparse = bool(kinds & {"bitmask", "bitmask24"})
    return add_sparsity_section(config, sparsity_config) if is_sparse else config


def describe_codes(config: Json, summary: Summary, dtype: torch.dtype) -> Json:
    """Return `config` with a section for quantized weights in the dialect `slim`."""
    return replace_sections(config, _describe_blobs(summary, dtype_name(dtype)))


def describe_coded(config: Json, summary: Summary) -> Json:
    """Return the `config` of a quantized folder with a section for entropy-coded tensors."""
    return add_section(config, _describe_blobs(summary, _main_dtype(summary)))


def _describe_blobs(summary: Summary, dtype: str) -> Json:
    items = sum(tensor.items for tensor in summary.tensors)
    return {
        "quant_method": METHOD,
        "version": VERSION,
        "preset": "lossless",
        "dtype": dtype,
        "bits_per_weight": round(8 * summary.stored_bytes / max(items, 1), 3),
        "how_to_load": HOW_TO_LOAD,
    }


def describe_checkpoint(config: Json) -> Json:
    """Return `config` with a section for weights inside a training checkpoint."""
    section = {
        "quant_method": METHOD,
        "version": CHECKPOINT_VERSION,
        "checkpoint": True,
        "how_to_load": (
            "Run `import slimtensors.transformers` before from_pretrained; to resume training, use"
            " slimtensors.transformers.SlimTrainer."
        ),
    }
    return replace_sections(config, section)


def remove_compression(config: Json) -> Json:
    """Return `config` as it was before compression; sections of other quantizers stay."""
    kept = remove_sections(config)
    for key, section in read_quantization_sections(config).items():
        method = read_method(section)
        is_sparse = method == COMPRESSED_TENSORS and section.keys() <= _SPARSE_ONLY
        if method == METHOD or is_sparse:
            before = section.get("before", {})
            if not isinstance(before, dict):
                raise ConfigError(f"{CONFIG}: {key}: 'before' must be a JSON object")
            kept |= before
        else:
            kept[key] = section  # the weights are still quantized
    return kept


def is_sparse_only(config: Json) -> bool:
    """Return True if compressed-tensors stored the weights sparse, without quantizing them."""
    if "bitmask" not in str(read_sparsity_section(config).get("format")):
        return False
    section = read_quantization_section(config)
    return not section or (_SPARSITY_KEY in section and section.keys() <= _SPARSE_ONLY)


def parse_quantization(config: Json) -> QuantizationConfig | None:
    """Return how compressed-tensors quantized the weights, or None if they are not quantized."""
    quantization = read_quantization(config)
    return quantization if quantization is not None and quantization.config_groups else None


def read_quantization(config: Json) -> QuantizationConfig | None:
    """Return the section of compressed-tensors, or None if there is none."""
    before = remove_compression(config)  # our own section keeps the previous one
    section = read_quantization_section(before)
    if not section:
        return None
    if (method := read_method(section)) != COMPRESSED_TENSORS:
        raise ConfigError(f"{CONFIG}: quantized by {method[:80]}, which is not supported")
    with report_malformed(CONFIG, ConfigError):
        return QuantizationConfig.from_dict(rename_methods(before))


def rename_methods(config: Json) -> Json:
    """Return `config` with the current `quant_method` of compressed-tensors for former ones."""
    sections = read_quantization_sections(config)
    named = {key: x | {"quant_method": read_method(x)} for key, x in sections.items()}
    return config | {key: x for key, x in named.items() if "quant_method" in sections[key]}


def read_dtype(config: Json) -> torch.dtype | None:
    """Return the dtype of the weights, or None if the config does not contain it."""
    value = config.get("dtype") or config.get("torch_dtype")
    if value is None:
        return None
    name = str(value).removeprefix("torch.")
    try:
        return find_dtype(name)
    except KeyError:
        raise ConfigError(f"{CONFIG}: unknown dtype {name!r}") from None


def _main_dtype(summary: Summary) -> str:
    """Return the dtype of most weights; loaders would otherwise use that of the first one."""
    sizes: Counter[str] = Counter()
    for tensor in summary.tensors:
        sizes[tensor.dtype] += tensor.dense_bytes
    floats = {dtype: size for dtype, size in sizes.items() if "float" in dtype}
    return max(floats or sizes, key=lambda dtype: sizes[dtype])


def _parse(text: bytes) -> Json:
    """Parse the text; the caller adds the name of the file to errors."""
    try:
        config = json.loads(text)
        to_json_text(config)  # JSON allows text that cannot be written: lone surrogates
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"expected a JSON object, got {type(config).__name__}")
    return config


@dataclass(frozen=True)
class SparsityConfig:
    """The section `sparsity_config`: how zeros are stored, and how many there are."""

    default_format: ClassVar[str] = "dense_sparsity"

    format: str = ""
    sparsity_structure: str = "unstructured"
    """`unstructured`, or an N:M pattern such as `2:4` or `8:16`."""
    global_sparsity: float = 0.0
    """Fraction of zeros among all weights. Informative only."""
    targets: Sequence[str] | None = None
    """Layers to compress: names, classes or `re:` patterns; None for all."""
    ignore: Sequence[str] | None = None
    """Layers that stay dense, even if a target matches them."""

    def __post_init__(self) -> None:
        if not self.format:
            object.__setattr__(self, "format", self.default_format)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form of compressed-tensors."""
        return {key: value for key, value in asdict(self).items() if value is not None}

    def to_section(self) -> dict[str, str]:
        """Return the JSON form of SparseML: underscores in the format, and the number as text."""
        return {
            "format": self.format.replace("-", "_"),
            "sparsity_structure": self.sparsity_structure,
            "global_sparsity": str(self.global_sparsity),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Parse the JSON form; `global_sparsity` may be text, as in older files."""
        known = {field.name for field in fields(cls)}
        for key in data.keys() - known:
            raise ConfigError(f"sparsity_config: unknown key {key!r}; {suggest(key, known)}")
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
    """Half of the values and one bit per position, for 2:4 sparsity."""

    default_format: ClassVar[str] = "sparse-24-bitmask"
    sparsity_structure: str = "2:4"


def parse_sparsity(section: Mapping[str, Any]) -> SparsityConfig:
    """Parse a `sparsity_config` in any spelling, ignoring keys that only other libraries use."""
    kinds = (SparsityConfig, BitmaskConfig, Sparse24BitmaskConfig)
    named = {kind.default_format.replace("_", "-"): kind for kind in kinds}
    spelling = str(section.get("format")).replace("_", "-")
    kind = named.get(spelling, SparsityConfig)
    known = {field.name for field in fields(kind)}
    values = {key: value for key, value in section.items() if key in known and value is not None}
    if spelling in named:
        values["format"] = kind.default_format
    with report_malformed(f"{CONFIG}: {_SPARSITY_KEY}", ConfigError):
        return kind.from_dict(values)
