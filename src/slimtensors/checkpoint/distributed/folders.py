"""Convert distributed checkpoints from and to model folders; inspect and verify them."""

import logging
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slimtensors.archive import Archive, Verification
from slimtensors.archive.delta import require_lossless
from slimtensors.archive.summary import Summary, TensorSummary
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, write
from slimtensors.checkpoint.distributed.manifest import (
    DistributedManifest,
    StoredChunk,
    StoredTensor,
)
from slimtensors.checkpoint.distributed.pending import (
    PendingFolder,
    create_run_id,
    resolve_path,
)
from slimtensors.checkpoint.distributed.pieces import (
    PIECE_BYTES,
    PREFIX,
    Box,
    KeyPath,
    Piece,
    build_rank_state,
    format_file_name,
    parse_piece_name,
    split_box,
)
from slimtensors.checkpoint.distributed.reader import StoredShards
from slimtensors.codecs import presets
from slimtensors.codecs.plan import Plan
from slimtensors.codecs.presets import Chooser
from slimtensors.codecs.statistics import Sparsity
from slimtensors.errors import ConfigError, FormatError, MismatchError
from slimtensors.folder.compress import record_sparsity
from slimtensors.folder.config_json import (
    CONFIG,
    describe_compression,
    edit_config_text,
    remove_compression,
)
from slimtensors.parallel import Each, Workers
from slimtensors.storage import (
    StrPath,
    is_distributed,
    local_path,
    locate_folder,
    read_bytes,
    write_file_atomically,
)
from slimtensors.storage.atomic import check_absent, create_folder
from slimtensors.tensor import Json, Spec, dtype_name

_log = logging.getLogger(__name__)


def consolidate(
    path: StrPath,
    target: StrPath,
    *,
    key: str = "model",
    config: StrPath | None = None,
    preset: str | Plan | Chooser = "dense",
    max_shard_size: int | str = "5GB",
    threads: int | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write the model of a distributed checkpoint as a model folder.

    `key` is the key of the model in the state, with dots for nested keys (`app.model`); it is
    ignored if the state contains nothing but tensors. Values that are not tensors are left out
    with a warning. Only a few tensors are in memory at a time.

    Example:
        >>> from slimtensors import save
        >>> summary = save({"weight": torch.ones(64, 64)}, "model.safetensors")
        >>> distribute("model.safetensors", "checkpoint")
        >>> len(consolidate("checkpoint", "model").tensors)
        1
    """
    stored = StoredShards(locate_folder(path, storage_options))
    stored.check_files()
    items = _find_model(stored, key)
    statistics: dict[str, Sparsity] = {}
    preset_name = preset if isinstance(preset, str) else "lossless"
    with create_folder(target) as folder:
        options = WriteOptions(
            preset=record_sparsity(presets.find(preset), statistics),
            max_shard_size=max_shard_size,
            threads=threads,
        )
        summary = write(ArchiveSource(items), folder, options).summary()

        def edit(data: Json) -> Json:
            plain = remove_compression(data)
            return describe_compression(
                plain, summary, statistics, preset=preset_name, dialect="slim"
            )

        if config is not None:
            text = edit_config_text(read_bytes(config), edit, str(config))
            write_file_atomically(folder / CONFIG, text)
    return replace(
        summary, files=[str(local_path(target) / Path(file).name) for file in summary.files]
    )


def distribute(
    path: StrPath,
    target: StrPath,
    *,
    key: str = "model",
    preset: str | Plan | Chooser = "lossless",
    overwrite: bool = False,
    threads: int | None = None,
) -> None:
    """Write a model folder as a distributed checkpoint that any number of ranks can load.

    The checkpoint contains the state `{key: {name: tensor}}`, bit for bit; a lossy preset raises
    `ConfigError`. Only a few tensors are in memory at a time.

    Example:
        >>> from slimtensors import save
        >>> summary = save({"weight": torch.ones(64, 64)}, "weights.safetensors")
        >>> distribute("weights.safetensors", "distributed")
    """
    choose = require_lossless(presets.find(preset))
    archive = Archive(path)
    archive.check_not_delta()
    if not (overwrite and is_distributed(target)):
        check_absent(resolve_path(target))
    pending = PendingFolder(target, create_run_id(), overwrite=overwrite)
    tensors: dict[str, StoredTensor] = {}
    files: dict[str, int] = {}
    for rank, names in enumerate(archive.shards().values()):
        file = pending.path / format_file_name(rank)
        source = _build_rank_source(archive, names, key, pending.run, rank)
        write(source, file, WriteOptions(preset=choose, threads=threads))
        files[file.name] = file.stat().st_size
        for name in names:
            spec = archive.spec(name)
            chunk = StoredChunk(Box.whole(spec.shape), rank)
            tensors[f"{key}.{name}"] = StoredTensor(spec, (chunk,), (key, name))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    pending.commit(
        DistributedManifest(pending.run, created, len(files), "exact", files, tensors, {})
    )


def inspect(path: StrPath, *, storage_options: dict[str, Any] | None = None) -> Summary:
    """Return the stored form and size of each tensor, summed over its pieces."""
    stored = StoredShards(locate_folder(path, storage_options))
    stored.check_files()
    pieces: dict[str, list[TensorSummary]] = {name: [] for name in stored.manifest.tensors}
    for piece in stored.iter_summaries():
        if piece.name.startswith(PREFIX):
            pieces.setdefault(parse_piece_name(piece.name)[0], []).append(piece)
    errors = stored.manifest.errors
    tensors = [
        _merge_summaries(name, tensor.spec, pieces[name], errors.get(name))
        for name, tensor in stored.manifest.tensors.items()
    ]
    return Summary(tensors, [str(stored.folder / name) for name in stored.manifest.files])


def verify(
    path: StrPath, *, threads: int | None = None, storage_options: dict[str, Any] | None = None
) -> Verification:
    """Read the checkpoint, and its base where needed, and verify all checksums.

    Raise if a file is missing, or if the base is missing or another one.
    """
    stored = StoredShards(locate_folder(path, storage_options))
    stored.check_files()
    tensors = stored.manifest.tensors
    pieces = [
        (name, piece, chunk.file)
        for name, tensor in tensors.items()
        for chunk in tensor.chunks
        for piece in stored.split_chunk(name, chunk, chunk.box)
    ]
    damaged: dict[str, str] = {}

    def measure(piece: tuple[str, Box, int]) -> int:
        name, box, _ = piece
        return box.numel * tensors[name].spec.dtype.itemsize

    with Workers(threads) as workers:

        def check(piece: tuple[str, Box, int]) -> str:
            try:
                stored.load_piece(*piece, workers.each)
            except (FormatError, MismatchError) as error:
                return str(error)
            return ""

        problems = workers.in_order(check, pieces, measure)
        for (name, *_), problem in zip(pieces, problems, strict=True):
            if problem:
                damaged.setdefault(name, problem)
    for name in stored.manifest.objects:
        try:
            stored.load_object(name)
        except (FormatError, MismatchError) as error:
            damaged[name] = str(error)
    return Verification(len(tensors), damaged)


def _find_model(stored: StoredShards, key: str) -> list[TensorSource]:
    """Return the tensors of the model, which are read on demand."""

    def make_source(name: str, full_name: str, spec: Spec) -> TensorSource:
        box = Box.whole(spec.shape)
        return TensorSource(name, spec, lambda each: stored.load_region(full_name, box, each))

    tensors = {name: tensor.path or (name,) for name, tensor in stored.manifest.tensors.items()}
    objects = {name: value.path or (name,) for name, value in stored.manifest.objects.items()}
    if all(len(path) == 1 for path in tensors.values()):
        key = ""  # the state is the model
    names = {full: name for full, path in tensors.items() if (name := _relative_name(path, key))}
    if not names:
        keys = ", ".join(sorted({str(path[0]) for path in tensors.values()})[:8])
        raise ConfigError(f"{stored.folder}: no tensors under {key!r}; found {keys or 'none'}")
    if skipped := [full for full, path in objects.items() if _relative_name(path, key)]:
        _log.warning("%s: values left out, not tensors: %s", stored.folder, ", ".join(skipped[:5]))
    return [
        make_source(name, full, stored.manifest.tensors[full].spec) for full, name in names.items()
    ]


def _relative_name(path: KeyPath, key: str) -> str | None:
    """Return the name of a value relative to `key`, or None if it is not below `key`."""
    keys = list(map(str, path))
    starts = (i for i in range(len(keys)) if ".".join(keys[:i]) == key)
    return next((".".join(keys[i:]) for i in starts), None)


def _build_rank_source(
    archive: Archive, names: list[str], key: str, run: str, rank: int
) -> ArchiveSource:
    """Return the pieces of one file, which are read on demand."""

    @lru_cache(maxsize=2)  # the pieces of a tensor are read one after the other
    def load(name: str) -> Tensor:
        return archive.get_tensor(name)

    def make_piece(name: str, spec: Spec, box: Box) -> tuple[TensorSource, Piece]:
        def read(each: Each) -> Tensor:
            return box.narrow(load(name), Box.whole(spec.shape))

        data = torch.empty(box.shape, dtype=spec.dtype, device="meta")
        piece = Piece(f"{key}.{name}", spec, (key, name), box, data)
        return TensorSource(piece.name, Spec(spec.dtype, box.shape), read), piece

    pairs = [
        make_piece(name, spec, box)
        for name in names
        for spec in [archive.spec(name)]
        for box in split_box(Box.whole(spec.shape), spec.dtype, PIECE_BYTES)
    ]
    tree = build_rank_state(run, rank, [piece for _, piece in pairs], {}).tree
    return ArchiveSource([source for source, _ in pairs], tree=tree)


def _merge_summaries(
    name: str, spec: Spec, pieces: list[TensorSummary], error: float | None
) -> TensorSummary:
    """Return the summary of a tensor from those of its pieces."""
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
