"""Between distributed checkpoints and model folders as transformers and its kin read them."""

import logging
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
from slimtensors.beside import CONFIG, edited_config
from slimtensors.checkpoint.commit import new_folder
from slimtensors.container import StrPath, local
from slimtensors.delta import lossless_only
from slimtensors.distributed.boxes import Box, pieces
from slimtensors.distributed.manifest import PIECE, Chunk, Keys, Manifest, StoredTensor
from slimtensors.distributed.pending import Pending
from slimtensors.distributed.share import Piece, file_name, share
from slimtensors.distributed.stored import StoredShards
from slimtensors.errors import ConfigError
from slimtensors.folder import described, measuring, without_section
from slimtensors.plan import Plan
from slimtensors.presets import Chooser
from slimtensors.sparsity import Sparsity
from slimtensors.spec import Each, Json, Spec
from slimtensors.summary import Summary

_LOG = logging.getLogger(__name__)

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

    `key` is what the state calls the model, with dots where it lies deeper (`app.model`); a state
    that is nothing but a model needs none. What is no tensor is left out, with a warning. Holds a
    few tensors in memory at a time.
    """
    stored = StoredShards(local(path))
    stored.check_files()
    items = _model_items(stored, key)
    found: dict[str, Sparsity] = {}
    label = preset if isinstance(preset, str) else "lossless"
    with new_folder(target) as folder:
        summary = write(
            State(items),
            folder,
            preset=measuring(presets.find(preset), found),
            dialect="slim",
            max_shard_size=max_shard_size,
            threads=threads,
        )

        def edit(data: Json) -> Json:
            plain = without_section(data)
            return described(plain, summary, found, preset=label, dialect="slim")

        if config is not None:
            (folder / CONFIG).write_bytes(edited_config(local(config).read_bytes(), edit))
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


def _model_items(stored: StoredShards, key: str) -> list[Item]:
    """Return the tensors of a model, to be read when their turn comes."""

    def item(name: str, full: str, spec: Spec) -> Item:
        return Item(name, spec, lambda each: stored.region(full, Box.whole(spec.shape), each))

    tensors = {full: t.path or (full,) for full, t in stored.manifest.tensors.items()}
    objects = {full: value.path or (full,) for full, value in stored.manifest.objects.items()}
    if all(len(path) == 1 for path in tensors.values()):
        key = ""  # nothing but a model
    names = {full: name for full, path in tensors.items() if (name := _name_in(path, key))}
    if not names:
        tops = ", ".join(sorted({str(path[0]) for path in tensors.values()})[:8])
        raise ConfigError(f"{stored.folder}: holds no tensors under {key!r}, but {tops or 'none'}")
    if left_out := [full for full, path in objects.items() if _name_in(path, key)]:
        few = ", ".join(left_out[:5])
        _LOG.warning("%s: are no tensors and stay out of the folder: %s", stored.folder, few)
    return [item(name, full, stored.manifest.tensors[full].spec) for full, name in names.items()]


def _name_in(path: Keys, key: str) -> str | None:
    """Return what something is called below `key`; none if it lies elsewhere."""
    words = list(map(str, path))
    below = (i for i in range(len(words)) if ".".join(words[:i]) == key)
    return next((".".join(words[i:]) for i in below), None)


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
