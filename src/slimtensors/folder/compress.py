"""Compress and decompress model folders, without building the model."""

from collections.abc import Callable, Iterable
from dataclasses import replace as replace_fields
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from slimtensors.archive import Archive, Progress
from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.originals import find_originals
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, as_source
from slimtensors.codecs import presets
from slimtensors.codecs.presets import Choice, Chooser, StatsRule
from slimtensors.codecs.statistics import Sparsity, sparsity_of
from slimtensors.errors import ConfigError, suggest
from slimtensors.folder.config_json import (
    FIT_REPORT,
    QUANTIZATION_REPORT,
    describe_compression,
    remove_compression,
)
from slimtensors.folder.job import ExtraFiles, build_folder, describe_job
from slimtensors.folder.processes import ProcessGroup
from slimtensors.folder.weights import FolderOptions, Weights
from slimtensors.parallel import Each
from slimtensors.storage import StrPath, locate
from slimtensors.tensor import Json

Keep = Callable[[str], bool]
"""Returns True for the names of selected tensors."""


def select_all(name: str) -> bool:
    """Return True: select every tensor."""
    return True


def compress_folder(
    source: StrPath | Archive,
    target: StrPath,
    *,
    preset: str | Chooser | None = None,
    dialect: str = "slim",
    keep: Keep = select_all,
    max_shard_size: int | str | None = None,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    ranks: ProcessGroup | None = None,
    preset_key: Json | None = None,
) -> Summary:
    """Write a model folder with compressed weights.

    Other files are copied, and `config.json` describes the compression. The target appears when it
    is complete. An interrupted run resumes with the unfinished files when it is called again.

    Args:
        source: model folder, its index file, a URL, or an open archive of one of them.
        target: folder or URL to write.
        preset: preset name, or function `(name, tensor)` that returns a plan. Default:
            `lossless`, or `sparse` for the dialect `compressed-tensors`.
        dialect: `slim` or `compressed-tensors`.
        keep: returns False for the names of tensors that stay plain.
        max_shard_size: maximum bytes per file, such as `"5GB"`; default: the files of the source.
        replace: whether to replace an existing folder.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.
        ranks: processes that share the work; each of them makes the same call.
        preset_key: JSON that identifies a preset function, so that a run with it can resume.

    Example:
        >>> from pathlib import Path
        >>> import slimtensors, torch
        >>> from slimtensors.folder import compress_folder
        >>> Path("model").mkdir()
        >>> _ = slimtensors.save({"w": torch.eye(256)}, "model/model.safetensors", preset="dense")
        >>> compress_folder("model", "model-slim").ratio > 10
        True
    """
    options = FolderOptions(
        preset=preset,
        dialect=dialect,
        max_shard_size=max_shard_size,
        replace=replace,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
        ranks=ranks,
    )
    return compress_with(source, target, options, keep=keep, preset_key=preset_key)


def compress_with(
    source: StrPath | Archive,
    target: StrPath,
    options: FolderOptions,
    *,
    keep: Keep = select_all,
    preset_key: Json | None = None,
    is_lossy: bool = False,
    files: ExtraFiles | None = None,
) -> Summary:
    """Do the same as `compress_folder`, with options as one value.

    The originals of a lossy copy cannot be written again, so their headers are not stored. The
    preset `lossless` keeps the codes of tensors that are rounded already.
    """
    dialect = options.dialect
    preset = presets.default(dialect) if options.preset is None else options.preset
    sparsity: dict[str, Sparsity] = {}
    choose = record_sparsity(restrict_to(presets.find(preset), keep), sparsity)
    rules = presets.STATS_RULES if dialect == "slim" and isinstance(preset, str) else {}

    archive = open_archive(source, options.storage_options)
    was_compressed = is_compressed(archive)
    keeps_codes = preset == "lossless" and dialect == "slim"
    rounded = {
        name for name in archive if keeps_codes and keep(name) and _is_rounded(archive, name)
    }

    def find_rule(name: str) -> StatsRule | None:
        return rules.get(str(preset)) if keep(name) and name not in rounded else None

    def make_source(part: Archive) -> ArchiveSource:
        found = as_source(part)
        items = [_copy_code(part, x, sparsity) if x.name in rounded else x for x in found.items]
        return replace_fields(found, items=items)

    def describe(config: Json, summary: Summary) -> Json:
        before = remove_compression(config) if was_compressed else config
        # Weights chosen by a function are kept as they are; later changes are stored losslessly.
        label = preset if isinstance(preset, str) else "lossless"
        return describe_compression(before, summary, sparsity, preset=label, dialect=dialect)

    key = preset if isinstance(preset, str) else preset_key
    settings = {
        "preset": key,
        "dialect": dialect,
        "max_shard_size": options.max_shard_size,
        "plain": [name for name in archive if not keep(name)],
    }
    return build_folder(
        Weights(
            archive,
            replace_fields(options, preset=choose),
            make_source=make_source,
            rule=find_rule,
            sparsity=sparsity,
            keeps_originals=not (is_lossy or presets.is_lossy(preset)),
        ),
        target,
        describe,
        job=describe_job(archive, settings) if key is not None else None,
        files=files,
    )


def _is_rounded(archive: Archive, name: str) -> bool:
    plan = archive.plan(name)
    return plan is not None and plan.is_lossy


def _copy_code(archive: Archive, item: TensorSource, sparsity: dict[str, Sparsity]) -> TensorSource:
    """Return a tensor as it is stored; reading it decodes it, for checksums and `sparsity`."""

    def read(each: Each) -> PackedTensor | None:
        sparsity[item.name] = sparsity_of(archive.load_one(item.name, each))
        return archive.read_packed(item.name)

    return replace_fields(item, read=read)


def decompress_folder(
    source: StrPath | Archive,
    target: StrPath,
    *,
    keep: Keep = select_all,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
    ranks: ProcessGroup | None = None,
) -> Summary:
    """Write a model folder with plain weights, and `config.json` as it was before compression.

    The files are identical to those that were compressed, byte for byte, unless tensors are left
    out or the folder does not describe its originals.

    Args:
        source: model folder, its index file, a URL, or an open archive of one of them.
        target: folder or URL to write.
        keep: returns False for the names of tensors to leave out.
        replace: whether to replace an existing folder.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.
        ranks: processes that share the work; each of them makes the same call.
    """
    options = FolderOptions(
        preset=presets.dense,
        replace=replace,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
        ranks=ranks,
    )
    return decompress_with(source, target, options, keep=keep)


def decompress_with(
    source: StrPath | Archive, target: StrPath, options: FolderOptions, *, keep: Keep = select_all
) -> Summary:
    """Do the same as `decompress_folder`, with options as one value."""
    archive = open_archive(source, options.storage_options)
    was_compressed = is_compressed(archive)
    selected = archive.select(name for name in archive if keep(name))
    settings: dict[str, Any] = {"preset": "dense", "only": list(selected)}
    if options.max_shard_size is not None:
        settings["max_shard_size"] = options.max_shard_size
    is_whole = len(selected) == len(archive) and options.max_shard_size is None
    originals = find_originals(archive) if is_whole else None
    is_lossy = any(plan.is_lossy for plan in map(archive.plan, selected) if plan is not None)
    return build_folder(
        Weights(selected, options, make_source=_make_plain, originals=originals),
        target,
        lambda config, _: remove_compression(config) if was_compressed else config,
        job=describe_job(archive, settings),
        files={QUANTIZATION_REPORT: None, FIT_REPORT: None} if is_lossy else None,
    )


def _make_plain(archive: Archive) -> ArchiveSource:
    return replace_fields(as_source(archive).expand_copies(), originals=None)


def is_model_folder(source: StrPath, *, storage_options: dict[str, Any] | None = None) -> bool:
    """Return True if `source` is a folder or its index, rather than one file."""
    location = locate(source, storage_options=storage_options)
    return location.is_folder() or location.name.endswith(".json")


def is_compressed(archive: Archive) -> bool:
    """Return True if any tensor is not stored as plain safetensors."""
    return archive.delta is not None or any(archive.info(name).codec != "plain" for name in archive)


def match_globs(only: list[str], skip: list[str]) -> Keep:
    """Return a test for names that match one of `only` (if not empty) and none of `skip`."""

    def keep(name: str) -> bool:
        is_selected = not only or any(fnmatchcase(name, glob) for glob in only)
        return is_selected and not any(fnmatchcase(name, glob) for glob in skip)

    return keep


def check_globs(names: Iterable[str], globs: list[str]) -> None:
    """Raise if a glob matches no name: it is probably misspelled."""
    known = list(names)
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in known):
            hint = suggest(glob, known[:2000]) if len(known) < 20 else "see slimtensors inspect"
            raise ConfigError(f"{glob!r} matches no tensor; {hint}")


def restrict_to(choose: Chooser, keep: Keep) -> Chooser:
    """Return a chooser that leaves the tensors that `keep` does not select plain."""

    def choose_selected(name: str, x: Tensor) -> Any:
        return choose(name, x) if keep(name) else Choice(None, "not selected")

    return choose_selected


def record_sparsity(choose: Chooser, sparsity: dict[str, Sparsity]) -> Chooser:
    """Return a chooser that also stores the sparsity of each tensor in `sparsity`."""

    def choose_and_record(name: str, x: Tensor) -> Any:
        sparsity[name] = sparsity_of(x)
        return choose(name, x)

    return choose_and_record
