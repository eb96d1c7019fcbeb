"""Convert distributed checkpoints from and to model folders, inspect and verify them."""

import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from slimtensors.archive import Archive, Verification
from slimtensors.archive.delta import lossless_only
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.write import ArchiveSource, TensorSource, write
from slimtensors.checkpoint.distributed.manifest import (
    PIECE,
    Box,
    DistributedManifest,
    Keys,
    StoredChunk,
    StoredTensor,
    split_box,
)
from slimtensors.checkpoint.distributed.pieces import PREFIX, Piece, file_name, piece_place, share
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.checkpoint.distributed.writer import Pending
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Chooser
from slimtensors.codecs.statistics import Sparsity
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.folder.compress import described, measuring, without_section
from slimtensors.folder.config_json import CONFIG, updated_config
from slimtensors.parallel import Each, Workers
from slimtensors.storage import StrPath, local_path
from slimtensors.storage.atomic import create_folder
from slimtensors.tensor import Json, Spec, dtype_name

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
    stored = StoredShards(local_path(path))
    stored.check_files()
    items = _model_items(stored, key)
    found: dict[str, Sparsity] = {}
    label = preset if isinstance(preset, str) else "lossless"
    with create_folder(target) as folder:
        summary = write(
            ArchiveSource(items),
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
            (folder / CONFIG).write_bytes(updated_config(local_path(config).read_bytes(), edit))
    return replace(
        summary, files=[str(local_path(target) / Path(file).name) for file in summary.files]
    )


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
            chunk = StoredChunk(Box.whole(spec.shape), rank)
            tensors[f"{key}.{name}"] = StoredTensor(spec, (chunk,), (key, name))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    pending.commit(
        DistributedManifest(pending.run, created, len(files), "exact", files, tensors, {})
    )


def _model_items(stored: StoredShards, key: str) -> list[TensorSource]:
    """Return the tensors of a model, to be read when their turn comes."""

    def item(name: str, full: str, spec: Spec) -> TensorSource:
        return TensorSource(
            name, spec, lambda each: stored.region(full, Box.whole(spec.shape), each)
        )

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


def _rank_state(archive: Archive, names: list[str], key: str, run: str, rank: int) -> ArchiveSource:
    """Return the tensors of one file, piece by piece, to be read when their turn comes."""

    @lru_cache(maxsize=2)  # the pieces of a tensor come one after the other
    def whole(name: str) -> Tensor:
        return archive.get_tensor(name)

    def item(name: str, spec: Spec, box: Box) -> tuple[TensorSource, Piece]:
        def read(each: Each) -> Tensor:
            return box.of(whole(name), Box.whole(spec.shape))

        shape = Spec(spec.dtype, box.shape)
        data = torch.empty(box.shape, dtype=spec.dtype, device="meta")
        piece = Piece(f"{key}.{name}", spec, (key, name), box, data)
        return TensorSource(piece.name, shape, read), piece

    made = [
        item(name, spec, box)
        for name in names
        for spec in [archive.spec(name)]
        for box in split_box(Box.whole(spec.shape), spec.dtype, PIECE)
    ]
    tree = share(run, rank, [piece for _, piece in made], {}).tree
    return ArchiveSource([item for item, _ in made], tree=tree)


def inspect(path: StrPath) -> Summary:
    """Return how every tensor is stored, all of its pieces together."""
    shards = StoredShards(local_path(path))
    shards.check_files()
    held: dict[str, list[TensorSummary]] = {name: [] for name in shards.manifest.tensors}
    for piece in shards.summaries():
        if piece.name.startswith(PREFIX):
            held.setdefault(piece_place(piece.name)[0], []).append(piece)
    errors = shards.manifest.errors
    tensors = [
        _joined(name, tensor.spec, held[name], errors.get(name))
        for name, tensor in shards.manifest.tensors.items()
    ]
    return Summary(tensors, [str(shards.folder / name) for name in shards.manifest.files])


def verify(path: StrPath, *, threads: int | None = None) -> Verification:
    """Read everything, of bases too where that is needed, checking all checksums.

    Raise if a file is missing, or the base is not the one that it was.
    """
    shards = StoredShards(local_path(path))
    shards.check_files()
    tensors = shards.manifest.tensors
    jobs = [
        (name, piece, chunk.file)
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
        for piece in shards.pieces(name, chunk.box, chunk.box)
    ]
    damaged: dict[str, str] = {}

    def size(job: tuple[str, Box, int]) -> int:
        return job[1].numel * tensors[job[0]].spec.dtype.itemsize

    with Workers(threads) as workers:

        def one(job: tuple[str, Box, int]) -> str:
            try:
                shards.piece(*job, workers.each)
            except (FormatError, MismatchError) as error:
                return str(error)
            return ""

        for (name, *_), told in zip(jobs, workers.in_order(one, jobs, size), strict=True):
            if told:
                damaged.setdefault(name, told)
    for name in shards.manifest.objects:
        try:
            shards.value(name)
        except (FormatError, MismatchError) as error:
            damaged[name] = str(error)
    return Verification(len(tensors), damaged)


def _joined(
    name: str, spec: Spec, pieces: list[TensorSummary], error: float | None
) -> TensorSummary:
    """Return what the pieces of a tensor cost together."""
    parts: dict[str, int] = {}
    for piece in pieces:
        for part, nbytes in piece.parts.items():
            parts[part] = parts.get(part, 0) + nbytes
    codecs = dict.fromkeys(piece.codec for piece in pieces if piece.codec != "tied")
    return TensorSummary(
        name,
        dtype_name(spec.dtype),
        spec.shape,
        " + ".join(codecs) or ("tied" if pieces else "plain"),
        spec.nbytes,
        sum(piece.stored_bytes for piece in pieces),
        ", ".join(dict.fromkeys(piece.file for piece in pieces)),
        pieces[0].note if pieces else "",
        error,
        parts,
    )
