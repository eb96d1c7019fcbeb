"""Model folders as transformers writes them: weights, `config.json` and whatever else is there."""

import json
import os
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from slimtensors import presets
from slimtensors.archive import Archive, Progress
from slimtensors.archive.state import State, as_state
from slimtensors.archive.write import write
from slimtensors.container import (
    INDEX,
    LocalPlace,
    Place,
    StrPath,
    local,
    note_parameters,
    place,
    sync_folder,
    weight_files,
    write_index,
    write_json,
)
from slimtensors.dialects import VERSION
from slimtensors.errors import ConfigError, nearest
from slimtensors.presets import Choice, Chooser
from slimtensors.sparsity import (
    BitmaskConfig,
    Sparse24BitmaskConfig,
    Sparsity,
    combined,
    sparsity_of,
)
from slimtensors.spec import Json
from slimtensors.summary import Summary, joined

Keep = Callable[[str], bool]
"""Tells by its name whether a tensor is meant."""


def matching(only: list[str], skip: list[str]) -> Keep:
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
    where = place(source, storage_options=storage_options)
    return where.is_folder() or where.name.endswith(".json")


def _folder_of(where: Place) -> Place:
    return where if where.is_folder() else where.parent()


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
) -> Summary:
    """Compress the weights of a model folder into a new one, without building the model.

    Shards stay as they are unless `max_shard_size` is given; tensors that `keep` refuses stay
    plain; other files are copied; `config.json` says what was done. The new folder appears when
    it is complete; an existing one is refused, or replaced if `replace` is set.
    """
    found: dict[str, Sparsity] = {}
    preset = presets.default(dialect) if preset is None else preset
    choose = measuring(limited(presets.find(preset), keep), found)
    where = place(source, storage_options=storage_options)
    with Archive(source, storage_options=storage_options) as archive:
        was_coded = is_coded(archive)
        how = How(choose, dialect, max_shard_size, threads, progress)

        def edit(config: Json, summary: Summary) -> Json:
            before = without_section(config) if was_coded else config
            # What a function chose can be kept as it is, and what changes after that, exactly.
            label = preset if isinstance(preset, str) else "lossless"
            return described(before, summary, found, preset=label, dialect=dialect)

        return remake(
            where,
            target,
            lambda folder: write_weights(archive, where, folder, how),
            edit,
            sources=[source],
            replace=replace,
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
) -> Summary:
    """Write a model folder with plain weights, and `config.json` as it was before compression."""
    where = place(source, storage_options=storage_options)
    with Archive(source, storage_options=storage_options) as archive:
        was_coded = is_coded(archive)
        how = How(presets.dense, "slim", None, threads, progress)
        kept = archive.select(name for name in archive if keep(name))
        return remake(
            where,
            target,
            lambda folder: write_weights(kept, where, folder, how),
            lambda config, _: without_section(config) if was_coded else config,
            sources=[source],
            replace=replace,
        )


def remake(
    where: Place,
    target: StrPath,
    write: Callable[[Path], Summary],
    edit: Callable[[Json, Summary], Json],
    *,
    sources: Sequence[StrPath],
    replace: bool,
) -> Summary:
    """Make a folder like `where`: its weights by `write`, its config by `edit`, other files alike.

    The new folder appears when it is complete. One that exists is replaced only if `replace` is
    set, and never if it holds one of the `sources`.
    """
    with _new_folder(target, *sources, replace=replace) as folder:
        summary = write(folder)
        _copy_others(where, folder)
        edit_config(folder, lambda config: edit(config, summary))
    return summary


def is_coded(archive: Archive) -> bool:
    """Tell whether any tensor is stored in another way than safetensors itself does."""
    return any(archive.info(name).codec != "plain" for name in archive)


@dataclass(frozen=True)
class How:
    """How weights are to be written."""

    choose: Chooser
    dialect: str
    max_shard_size: int | str | None
    threads: int | None
    progress: Progress | None


def limited(choose: Chooser, keep: Keep) -> Chooser:
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


@contextmanager
def _new_folder(path: StrPath, *sources: StrPath, replace: bool) -> Iterator[Path]:
    """Give a folder to fill, which takes the place of `path` at the end, or disappears."""
    target = Path(os.path.realpath(local(path)))
    if target.exists():
        _check_replaceable(target, sources, replace=replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    mark = secrets.token_hex(4)
    folder = target.with_name(f".{target.name}.{mark}.slimtensors-tmp")
    folder.mkdir()
    try:
        yield folder
        old = target.with_name(f".{target.name}.{mark}.slimtensors-old")
        try:
            if target.exists():
                target.rename(old)
            folder.rename(target)
        except BaseException:
            if old.exists() and not target.exists():
                old.rename(target)
            raise
        sync_folder(target.parent)
        if old.exists():
            shutil.rmtree(old)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_replaceable(target: Path, sources: Sequence[StrPath], *, replace: bool) -> None:
    """Raise if replacing a folder would destroy what nobody wants destroyed."""
    if not replace:
        raise ConfigError(f"{target}: exists already; pass replace=True")
    if not target.is_dir():
        raise ConfigError(f"{target}: is a file, not a folder")
    paths = [Path(os.path.realpath(source)) for source in sources]
    if any(target in (path if path.is_dir() else path.parent).parents for path in paths):
        raise ConfigError(f"{target}: holds the source's folder and cannot be replaced")
    if any(target.iterdir()) and not any(target.rglob("*.safetensors")):
        raise ConfigError(f"{target}: holds files, but no model, and is not replaced")


def write_weights(
    archive: Archive,
    where: Place,
    folder: Path,
    how: How,
    state: Callable[[Archive], State] = as_state,
) -> Summary:
    """Write the weights of the folder `where` in as many files, by default as they are there.

    `state` tells what is written of the tensors of a file.
    """

    def put(part: Archive, path: Path, max_shard_size: int | str | None) -> Summary:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(
            state(part),
            path,
            preset=how.choose,
            dialect=how.dialect,
            max_shard_size=max_shard_size,
            threads=how.threads,
            progress=how.progress,
        )

    if how.max_shard_size is not None:
        summary = put(archive, folder, how.max_shard_size)
        note_parameters(folder / INDEX, summary.items)
        return summary
    main, *has_index = weight_files(where)
    if not has_index:
        return put(archive, folder / main, None)
    shards = archive.shards()
    parts = [put(archive.select(names), folder / file, None) for file, names in shards.items()]
    write_index(folder, main, list(shards))
    summary = joined(parts)
    note_parameters(folder / main, summary.items)
    return summary


def _copy_others(where: Place, folder: Path) -> None:
    """Copy everything but the weights, their index, and what is hidden."""
    weights = set(weight_files(where))
    source = _folder_of(where)
    for name in source.walk():
        if name in weights or any(part.startswith(".") for part in PurePath(name).parts):
            continue
        copied = folder / name
        copied.parent.mkdir(parents=True, exist_ok=True)
        original = source.child(name)
        if isinstance(original, LocalPlace):
            shutil.copy(original.path, copied)
        else:
            copied.write_bytes(original.read())


def read_config(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> Json:
    """Return what `config.json` beside the weights says; nothing if there is none."""
    folder = _folder_of(place(source, storage_options=storage_options))
    if "config.json" not in folder.files():
        return {}
    return _parse_config(folder.child("config.json").read(), "config.json")


def edit_config(folder: Path, edit: Callable[[Json], Json]) -> None:
    """Rewrite `config.json`, if there is one and `edit` changes it."""
    path = folder / "config.json"
    if not path.exists():
        return
    config = _parse_config(path.read_bytes(), path.name)
    edited = edit(config)
    if edited != config:
        write_json(path, edited)


def _parse_config(text: bytes, name: str) -> Json:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name}: is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{name}: is not a table")
    return config


def described(
    config: Json, summary: Summary, found: Mapping[str, Sparsity], *, preset: str, dialect: str
) -> Json:
    """Return `config` with what it should say about weights that were written like this."""
    codecs = Counter(t.codec for t in summary.tensors if t.codec not in ("plain", "tied"))
    if not codecs:
        return config
    overall = combined(found.values())
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
