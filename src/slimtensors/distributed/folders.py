"""Between distributed checkpoints and model folders as transformers and its kin read them."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from slimtensors import presets
from slimtensors.archive import Archive
from slimtensors.archive.state import Item, State
from slimtensors.archive.write import write
from slimtensors.checkpoint.commit import new_folder
from slimtensors.container import StrPath, local
from slimtensors.delta import lossless_only
from slimtensors.distributed.boxes import Box, pieces
from slimtensors.distributed.manifest import PIECE, Chunk, Manifest, StoredTensor
from slimtensors.distributed.pending import Pending
from slimtensors.distributed.share import Piece, file_name, share
from slimtensors.distributed.stored import StoredShards
from slimtensors.errors import ConfigError
from slimtensors.plan import Plan
from slimtensors.presets import Chooser
from slimtensors.spec import Each, Spec
from slimtensors.summary import Summary

_KEY = "model"


def consolidate(
    path: StrPath,
    target: StrPath,
    *,
    key: str = _KEY,
    config: StrPath | None = None,
    preset: str | Plan | Chooser = "dense",
    max_shard_size: int | str = "5GB",
    threads: int | None = None,
) -> Summary:
    """Write the model of a distributed checkpoint as a folder: shards, an index, `config.json`.

    `key` is what the state calls the model; a state that is nothing but a model needs none. Holds a
    few tensors in memory at a time.
    """
    stored = StoredShards(local(path))
    stored.check_files()
    items = list(_model_items(stored, key))
    if not items:
        tops = sorted({name.partition(".")[0] for name in stored.manifest.tensors})
        raise ConfigError(f"{path}: holds no tensors under {key!r}, but {', '.join(tops[:8])}")
    with new_folder(target) as folder:
        summary = write(
            State(items),
            folder,
            preset=preset,
            dialect="slim",
            max_shard_size=max_shard_size,
            threads=threads,
        )
        if config is not None:
            shutil.copyfile(local(config), folder / "config.json")
    return replace(summary, files=[str(local(target) / Path(file).name) for file in summary.files])


def distribute(
    path: StrPath,
    target: StrPath,
    *,
    key: str = _KEY,
    preset: str | Plan | Chooser = "lossless",
    overwrite: bool = False,
    threads: int | None = None,
) -> None:
    """Write a model folder as a distributed checkpoint that any number of ranks can load.

    Its tensors become `{key: {name: tensor}}`, bit for bit; a preset that rounds is refused. A few
    of them are in memory at a time.
    """
    choose = lossless_only(presets.find(preset))
    archive = Archive(path)
    archive.check_whole()
    pending = Pending(target, overwrite=overwrite)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}
    for rank, names in enumerate(archive.shards().values()):
        file = pending.folder / file_name(rank)
        state = _rank_state(archive, names, key, pending.run, rank)
        write(state, file, preset=choose, dialect="slim", threads=threads)
        files[file.name] = file.stat().st_size
        for name in names:
            spec = archive.spec(name)
            chunk = Chunk(Box.whole(spec.shape), rank)
            tensors[f"{key}.{name}"] = StoredTensor(spec, (chunk,), (key, name))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    pending.commit(Manifest(pending.run, created, len(files), "exact", files, tensors, {}))


def _model_items(stored: StoredShards, key: str) -> Iterator[Item]:
    """Yield the tensors of a model, to be read when their turn comes."""

    def item(name: str, full: str, spec: Spec) -> Item:
        return Item(name, spec, lambda each: stored.region(full, Box.whole(spec.shape), each))

    paths = {full: t.path or (full,) for full, t in stored.manifest.tensors.items()}
    is_nested = any(path[0] == key and len(path) > 1 for path in paths.values())
    for full, path in paths.items():
        spec = stored.manifest.tensors[full].spec
        if is_nested and path[0] == key:
            yield item(".".join(map(str, path[1:])), full, spec)
        elif not is_nested and len(path) == 1:
            yield item(full, full, spec)


def _rank_state(archive: Archive, names: list[str], key: str, run: str, rank: int) -> State:
    """Return the tensors of one file, piece by piece, to be read when their turn comes."""

    @lru_cache(maxsize=2)  # the pieces of a tensor come one after the other
    def whole(name: str) -> Tensor:
        return archive.get_tensor(name)

    def item(name: str, spec: Spec, box: Box) -> tuple[Item, Piece]:
        def read(each: Each) -> Tensor:
            return box.of(whole(name), Box.whole(spec.shape))

        shape = Spec(spec.dtype, box.shape)
        data = torch.empty(box.shape, dtype=spec.dtype, device="meta")
        piece = Piece(f"{key}.{name}", spec, (key, name), box, data)
        return Item(piece.name, shape, read), piece

    made = [
        item(name, spec, box)
        for name in names
        for spec in [archive.spec(name)]
        for box in pieces(Box.whole(spec.shape), spec.dtype, PIECE)
    ]
    tree = share(run, rank, [piece for _, piece in made], {}).tree
    return State([item for item, _ in made], tree=tree)
