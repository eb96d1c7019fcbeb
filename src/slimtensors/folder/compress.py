"""Model folders as transformers writes them: weights, `config.json` and whatever else is there."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.dialects import VERSION
from slimtensors.archive.summary import Summary
from slimtensors.codecs import presets
from slimtensors.codecs.presets import Choice, Chooser, StatsRule
from slimtensors.codecs.statistics import Sparsity, merge, sparsity_of
from slimtensors.errors import ConfigError, nearest
from slimtensors.folder.config_json import BitmaskConfig, Sparse24BitmaskConfig
from slimtensors.folder.job import job_of, make_folder
from slimtensors.folder.processes import ProcessGroup, SingleProcess
from slimtensors.folder.weights import WeightOptions, Weights
from slimtensors.storage import StrPath, locate
from slimtensors.tensor import Json

Keep = Callable[[str], bool]
"""Tells by its name whether a tensor is meant."""


def match_globs(only: list[str], skip: list[str]) -> Keep:
    """Return a test for names that match one of `only` (if any is given) and none of `skip`."""

    def keep(name: str) -> bool:
        wanted = not only or any(fnmatchcase(name, glob) for glob in only)
        return wanted and not any(fnmatchcase(name, glob) for glob in skip)

    return keep


def check_globs(names: Iterable[str], globs: list[str]) -> None:
    """Raise for the first glob that matches no name: it is probably misspelt."""
    known = list(names)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in known):
            hint = nearest(glob, known[:2000]) if len(known) < 20 else "see slimtensors inspect"
            raise ConfigError(f"{glob!r} matches no tensor; {hint}")


def is_model(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> bool:
    """Tell whether `source` is a whole folder (or its index) rather than one file."""
    where = locate(source, storage_options=storage_options)
    return where.is_folder() or where.name.endswith(".json")


def compress_folder(
    source: StrPath,
    target: StrPath,
    *,
    preset: str | Chooser | None = None,
    dialect: str = "slim",
    keep: Keep = lambda name: True,
    max_shard_size: int | str | None = None,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    ranks: ProcessGroup | None = None,
    stands_for: Json | None = None,
) -> Summary:
    """Compress the weights of a model folder into a new one, without building the model.

    Shards stay as they are unless `max_shard_size` is given; tensors that `keep` refuses stay
    plain; other files are copied; `config.json` says what was done. The new folder appears when
    it is complete; an existing one is refused, or replaced if `replace` is set.

    With several `ranks`, each of which makes the same call, files are divided over them by bytes,
    and rank 0 adds the rest. A run that was stopped goes on with the files that are not finished,
    if it is the same again; for that, if `preset` is a function, `stands_for` tells what it does.
    """
    found: dict[str, Sparsity] = {}
    preset = presets.default(dialect) if preset is None else preset
    choose = measuring(restrict_to(presets.find(preset), keep), found)
    where = locate(source, storage_options=storage_options)
    rules = presets.STATS_RULES if dialect == "slim" and isinstance(preset, str) else {}

    def rule(name: str) -> StatsRule | None:
        return rules.get(str(preset)) if keep(name) else None

    with Archive(source, storage_options=storage_options) as archive:
        was_coded = is_coded(archive)
        options = {
            "preset": preset if isinstance(preset, str) else stands_for,
            "dialect": dialect,
            "max_shard_size": max_shard_size,
            "plain": [name for name in archive if not keep(name)],
        }
        job = job_of(archive, where, options) if options["preset"] is not None else None
        how = WeightOptions(
            choose,
            dialect,
            max_shard_size,
            threads,
            progress,
            rule=rule,
            found=found,
            ranks=ranks or SingleProcess(),
        )

        def edit(config: Json, summary: Summary) -> Json:
            before = without_section(config) if was_coded else config
            # What a function chose can be kept as it is, and what changes after that, exactly.
            label = preset if isinstance(preset, str) else "lossless"
            return described(before, summary, found, preset=label, dialect=dialect)

        return make_folder(
            Weights(archive, where, how),
            target,
            edit,
            job=job,
            replace=replace,
            storage_options=storage_options,
        )


def decompress_folder(
    source: StrPath,
    target: StrPath,
    *,
    keep: Keep = lambda name: True,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    ranks: ProcessGroup | None = None,
) -> Summary:
    """Write a model folder with plain weights, and `config.json` as it was before compression."""
    where = locate(source, storage_options=storage_options)
    with Archive(source, storage_options=storage_options) as archive:
        was_coded = is_coded(archive)
        kept = archive.select(name for name in archive if keep(name))
        how = WeightOptions(
            presets.dense, "slim", None, threads, progress, ranks=ranks or SingleProcess()
        )
        return make_folder(
            Weights(kept, where, how),
            target,
            lambda config, _: without_section(config) if was_coded else config,
            job=job_of(archive, where, {"preset": "dense", "only": list(kept)}),
            replace=replace,
            storage_options=storage_options,
        )


def is_coded(archive: Archive) -> bool:
    """Tell whether any tensor is stored in another way than safetensors itself does."""
    return any(archive.info(name).codec != "plain" for name in archive)


def restrict_to(choose: Chooser, keep: Keep) -> Chooser:
    """Return a rule that leaves the tensors that `keep` refuses as they are."""

    def chosen(name: str, x: Tensor) -> Any:
        return choose(name, x) if keep(name) else Choice(None, "was not selected")

    return chosen


def measuring(choose: Chooser, found: dict[str, Sparsity]) -> Chooser:
    """Return a rule that also notes in `found` how sparse each tensor is."""

    def measured(name: str, x: Tensor) -> Any:
        found[name] = sparsity_of(x)
        return choose(name, x)

    return measured


def described(
    config: Json, summary: Summary, found: Mapping[str, Sparsity], *, preset: str, dialect: str
) -> Json:
    """Return `config` with what it should say about weights that were written like this."""
    codecs = Counter(t.codec for t in summary.tensors if t.codec not in ("plain", "tied"))
    if not codecs:
        return config
    overall = merge(found.values())
    kinds = {codec.partition("(")[0] for codec in codecs}
    share = round(overall.share, 4)
    sparsity = (
        Sparse24BitmaskConfig(global_sparsity=share)
        if kinds == {"bitmask24"}
        else BitmaskConfig(sparsity_structure=overall.structure, global_sparsity=share)
    ).to_dict()
    if dialect == "compressed-tensors":
        section: Json = {"quant_method": dialect, "sparsity_config": sparsity}
    else:
        section = {
            "quant_method": "slimtensors",
            "version": VERSION,
            "preset": preset,
            "dtype": _main_dtype(summary),
            "codecs": dict(sorted(codecs.items())),
            "bits_per_weight": round(8 * summary.stored_bytes / overall.items, 3),
        }
    described = with_section(config, section)
    if kinds & {"bitmask", "bitmask24"}:
        described["sparsity_config"] = sparsity
    return described


def with_section(config: Json, section: Json) -> Json:
    """Return `config` with what it says about its weights replaced by `section`."""
    before = {key: config[key] for key in _SECTIONS if key in config}
    if before:
        section = {**section, "before": before}  # so that it can be put back
    return {**config, "quantization_config": section}


def _main_dtype(summary: Summary) -> str:
    """Return the dtype of most weights, which loaders would else guess from the first one."""
    sizes: Counter[str] = Counter()
    for tensor in summary.tensors:
        sizes[tensor.dtype] += tensor.dense_bytes
    floats = {dtype: size for dtype, size in sizes.items() if "float" in dtype}
    return max(floats or sizes, key=lambda dtype: sizes[dtype])


def holds_sparse_parts(config: Json) -> bool:
    """Tell whether a `config.json` is of a folder that compressed-tensors made sparse, no more."""
    for key in ("quantization_config", "compression_config"):
        section = config.get(key)
        if isinstance(section, dict) and section:
            return "sparsity_config" in section and section.keys() <= _SPARSE_ONLY
    sparsity = config.get("sparsity_config")
    return isinstance(sparsity, dict) and "bitmask" in str(sparsity.get("format"))


def without_section(config: Json) -> Json:
    """Return `config` without what it says about compressed weights."""
    kept = without_any_section(config)
    for key in ("quantization_config", "compression_config"):
        section = config.get(key)
        if not isinstance(section, dict):
            continue
        method = section.get("quant_method", "compressed-tensors")
        is_sparse = method == "compressed-tensors" and section.keys() <= _SPARSE_ONLY
        if method == "slimtensors" or is_sparse:
            before = section.get("before", {})
            if not isinstance(before, dict):
                raise ConfigError(f"config.json: {key}: 'before' is not a table")
            kept |= before
        else:
            kept[key] = section  # the weights are still quantized
    return kept


def without_any_section(config: Json) -> Json:
    """Return a config that says nothing of how weights are stored."""
    return {key: value for key, value in config.items() if key not in _SECTIONS}


_SECTIONS = ("quantization_config", "compression_config", "sparsity_config")
_SPARSE_ONLY = {"quant_method", "version", "sparsity_config", "transform_config", "before"}
"""A section of compressed-tensors that says nothing but that the weights are sparse."""
