"""Model folders as differences from other models."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any

from slimtensors.archive import Archive, Progress
from slimtensors.archive.delta import (
    DeltaManifest,
    as_archive,
    check_base_kept,
    delta_source,
    restored_source,
)
from slimtensors.archive.summary import Summary, joined
from slimtensors.archive.write import ArchiveSource, write
from slimtensors.codecs import presets
from slimtensors.folder.compress import is_coded, with_section, without_section
from slimtensors.folder.job import remake
from slimtensors.storage import DELTA, SINGLE, Location, StrPath, locate, weight_files, write_index
from slimtensors.tensor import Json


def diff_folder(
    new: StrPath,
    base: StrPath,
    target: StrPath,
    *,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write a folder whose weights are a delta from `base`, with the other files of `new`.

    Its `config.json` says so, and its weights are called `delta.safetensors`, so that nobody
    takes it for a model.
    """
    where = locate(new, storage_options=storage_options)
    after, before = as_archive(new, storage_options), as_archive(base, storage_options)
    check_base_kept(before, target)
    was_coded = is_coded(after)
    state = delta_source(after, before, presets.lossless, files=_files(after, where))

    def put(folder: Path) -> Summary:
        return write(
            state,
            folder / DELTA,
            preset="lossless",
            dialect="slim",
            threads=threads,
            progress=progress,
        )

    def edit(config: Json, summary: Summary) -> Json:
        whole = without_section(config) if was_coded else config
        return with_section(whole, _section(state, summary, before))

    return remake(where, target, put, edit, sources=[new, base], replace=replace)


def restore_folder(
    delta: StrPath,
    base: StrPath,
    target: StrPath,
    *,
    max_shard_size: int | str | None = None,
    replace: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the folder that `diff_folder` was given, its weights plain.

    They lie in files as they did there, unless `max_shard_size` is given.
    """
    where = locate(delta, storage_options=storage_options)
    after = as_archive(delta, storage_options)
    state = restored_source(after, as_archive(base, storage_options))
    changed = DeltaManifest.of(after)

    def put_all(path: Path, state: ArchiveSource) -> Summary:
        path.parent.mkdir(parents=True, exist_ok=True)
        return write(
            state,
            path,
            preset="dense",
            dialect="slim",
            max_shard_size=max_shard_size,
            threads=threads,
            progress=progress,
        )

    def put(folder: Path) -> Summary:
        if max_shard_size is not None:
            return put_all(folder, state)
        if changed.files is None:
            return put_all(folder / SINGLE, state)
        parts = [
            put_all(folder / file, _part(state, names)) for file, names in changed.files.items()
        ]
        if changed.index is not None:
            write_index(folder, changed.index, list(changed.files))
        return joined(parts)

    def edit(config: Json, _: Summary) -> Json:
        return without_section(config)

    return remake(where, target, put, edit, sources=[delta, base], replace=replace)


def _files(archive: Archive, where: Location) -> dict[str, Any]:
    """Return in which files a model lies, unless it is one of the usual name."""
    main, *shards = weight_files(where)
    if main == SINGLE:
        return {}
    tied = archive.tied()
    files = {
        file: [name for name in names if name not in tied]
        for file, names in archive.shards().items()
    }
    return {"index": main, "files": files} if shards else {"files": files}


def _part(state: ArchiveSource, names: Collection[str]) -> ArchiveSource:
    """Return the part of a state that belongs into one file."""
    chosen = set(names)
    return ArchiveSource(
        [item for item in state.items if item.name in chosen],
        {name: home for name, home in state.tied.items() if home in chosen},
    )


def _section(state: ArchiveSource, summary: Summary, base: Archive) -> Json:
    """Return what `config.json` says about a delta."""
    changed = DeltaManifest.from_json(state.delta or {})
    items = sum(item.spec.numel for item in state.items)
    return {
        "quant_method": "slimtensors",
        "delta": {
            "base": PurePath(base.path).name,
            "digest": changed.base_digest,
            "tensors": dict(
                sorted(Counter(entry[0] for entry in changed.tensors.values()).items())
            ),
        },
        "bits_per_weight": round(8 * summary.stored_bytes / items, 3) if items else 0.0,
    }
