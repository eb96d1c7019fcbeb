"""Store model folders as deltas from other models."""

from collections import Counter
from collections.abc import Collection
from dataclasses import replace as replace_fields
from pathlib import Path
from typing import Any

import torch

from slimtensors.archive import Archive, Progress
from slimtensors.archive.decompress import make_exact_sources
from slimtensors.archive.delta import (
    BaseMatch,
    make_delta_source,
    make_hint,
    open_restored,
)
from slimtensors.archive.delta_manifest import BaseHint, DeltaManifest
from slimtensors.archive.originals import Originals, find_originals
from slimtensors.archive.read import open_archive
from slimtensors.archive.summary import Summary, merge_summaries
from slimtensors.archive.write import ArchiveSource, as_source, write
from slimtensors.codecs import presets
from slimtensors.folder.compress import is_compressed
from slimtensors.folder.config_json import METHOD, add_section, remove_compression
from slimtensors.folder.convert import main_dtype
from slimtensors.folder.job import find_paths, replace_weights
from slimtensors.folder.weights import FolderOptions
from slimtensors.storage import (
    DELTA,
    SINGLE,
    StrPath,
    weight_files,
    write_file_atomically,
    write_index,
)
from slimtensors.tensor import Json, dtype_name

_HOW_TO_LOAD = (
    "Run `import slimtensors.transformers` before from_pretrained, with the base beside this"
    " folder, in the cache of the hub, or in a folder of SLIMTENSORS_BASES; or write the complete"
    " model with `slimtensors restore`."
)
"""Note for users who load the folder without slimtensors."""


def diff_folder(
    new: StrPath | Archive,
    base: StrPath | Archive,
    target: StrPath,
    *,
    replace: bool = False,
    unrelated: bool = False,
    base_model: str | None = None,
    base_revision: str | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write a folder whose weights are a delta from `base`, with the other files of `new`.

    The weights are called `delta.safetensors` and `config.json` describes them, so that loaders
    without slimtensors do not read the folder as a model.

    Args:
        new, base: model folders, files or URLs, or open archives of them.
        target: folder or URL to write.
        replace: whether to replace an existing folder.
        unrelated: whether to accept a base with other tensors.
        base_model, base_revision: name and revision of the base on the hub, with which its cache
            is searched; by default those of a `base` in that cache.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.
    """
    options = FolderOptions(
        preset=presets.lossless,
        replace=replace,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    )
    after, before = open_archive(new, storage_options), open_archive(base, storage_options)
    hint = make_hint(before, base_model, base_revision)
    if not unrelated:
        BaseMatch.of(after, before).check()
    was_compressed = is_compressed(after)
    files = _describe_files(after)
    source = make_delta_source(after, before, presets.lossless, hint=hint, files=files)

    def write_delta(folder: Path) -> Summary:
        return write(source, folder / DELTA, options).summary()

    def describe(config: Json, summary: Summary) -> Json:
        original = remove_compression(config) if was_compressed else config
        return add_section(original, _make_section(source, summary, hint, main_dtype(after)))

    sources = [*find_paths(after), *before.paths()]
    return replace_weights(
        after.location, target, write_delta, describe, sources=sources, options=options
    )


def restore_folder(
    delta: StrPath | Archive,
    base: StrPath | Archive | None,
    target: StrPath,
    *,
    max_shard_size: int | str | None = None,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the folder that was passed to `diff_folder` as `new`, with plain weights.

    Args:
        delta: folder written by `diff_folder`.
        base: the base passed to `diff_folder`; for None, it is searched for as `open` does.
        target: folder or URL to write.
        max_shard_size: maximum bytes per file, such as `"5GB"`; default: the original files.
        replace: whether to replace an existing folder.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.
    """
    options = FolderOptions(
        preset=presets.dense,
        max_shard_size=max_shard_size,
        replace=replace,
        threads=threads,
        progress=progress,
        storage_options=storage_options,
    )
    model = open_restored(delta, base, storage_options)
    source, originals = as_source(model), find_originals(model)
    manifest = DeltaManifest.from_json(model.delta or {})
    plain = replace_fields(source, originals=None)

    def write_originals(folder: Path, originals: Originals) -> Summary:
        parts = []
        for file, exact in make_exact_sources(source, originals).items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            parts.append(write(exact, folder / file, options).summary())
        if originals.index is not None:
            name, text = originals.index
            write_file_atomically(folder / name, text)
        return merge_summaries(parts)

    def write_weights(folder: Path) -> Summary:
        if max_shard_size is not None:
            return write(plain, folder, options).summary()
        if originals is not None:
            return write_originals(folder, originals)
        if manifest.files is None:
            return write(plain, folder / SINGLE, options).summary()
        parts = []
        for file, names in manifest.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            parts.append(write(_select(plain, names), folder / file, options).summary())
        if manifest.index is not None:
            write_index(folder, manifest.index, list(manifest.files))
        return merge_summaries(parts)

    return replace_weights(
        model.location,
        target,
        write_weights,
        lambda config, _: remove_compression(config),
        sources=find_paths(model),
        options=options,
    )


def _describe_files(archive: Archive) -> dict[str, Any]:
    """Return the files of a model for `DeltaManifest`; empty for one file with the default name."""
    main, *shards = weight_files(archive.location)
    if main == SINGLE:
        return {}
    tied = archive.tied()
    files = {
        file: [name for name in names if name not in tied]
        for file, names in archive.shards().items()
    }
    return {"index": main, "files": files} if shards else {"files": files}


def _select(source: ArchiveSource, names: Collection[str]) -> ArchiveSource:
    """Return the part of a source that contains these tensors."""
    selected = set(names)
    return ArchiveSource(
        [item for item in source.items if item.name in selected],
        {name: home for name, home in source.tied.items() if home in selected},
    )


def _make_section(
    source: ArchiveSource, summary: Summary, hint: BaseHint, dtype: torch.dtype
) -> Json:
    """Return the section of `config.json` that describes a delta."""
    manifest = DeltaManifest.from_json(source.delta or {})
    items = sum(item.spec.numel for item in source.items)
    kinds = Counter(entry[0] for entry in manifest.tensors.values())
    on_hub = {"base_model": hint.model, "base_revision": hint.revision}
    return {
        "quant_method": METHOD,
        "dtype": dtype_name(dtype),
        "delta": {
            "base": hint.name,
            **{key: value for key, value in on_hub.items() if value is not None},
            "digest": manifest.base_digest,
            "tensors": dict(sorted(kinds.items())),
        },
        "bits_per_weight": round(8 * summary.stored_bytes / items, 3) if items else 0.0,
        "how_to_load": _HOW_TO_LOAD,
    }
