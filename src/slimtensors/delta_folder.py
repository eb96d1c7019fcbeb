"""Model folders as differences from other models."""

from collections import Counter
from collections.abc import Collection
from pathlib import Path, PurePath
from typing import Any

from slimtensors import presets
from slimtensors.archive import Archive, Progress
from slimtensors.archive.state import State
from slimtensors.archive.write import write
from slimtensors.container import DELTA, SINGLE, Place, StrPath, place, weight_files, write_index
from slimtensors.delta import Changed, changes, check_keeps, opened, restored
from slimtensors.folder import is_coded, with_section, without_section
from slimtensors.making import remake
from slimtensors.spec import Json
from slimtensors.summary import Summary, joined


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
    where = place(new, storage_options=storage_options)
    after, before = opened(new, storage_options), opened(base, storage_options)
    check_keeps(before, target)
    was_coded = is_coded(after)
    state = changes(after, before, presets.lossless, files=_files(after, where))

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
    where = place(delta, storage_options=storage_options)
    after = opened(delta, storage_options)
    state = restored(after, opened(base, storage_options))
    changed = Changed.of(after)

    def put_all(path: Path, state: State) -> Summary:
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


def _files(archive: Archive, where: Place) -> dict[str, Any]:
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


def _part(state: State, names: Collection[str]) -> State:
    """Return the part of a state that belongs into one file."""
    chosen = set(names)
    return State(
        [item for item in state.items if item.name in chosen],
        {name: home for name, home in state.tied.items() if home in chosen},
    )


def _section(state: State, summary: Summary, base: Archive) -> Json:
    """Return what `config.json` says about a delta."""
    changed = Changed.from_json(state.delta or {})
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
