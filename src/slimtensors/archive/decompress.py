"""Write plain safetensors files again: byte for byte where an archive describes the originals."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from slimtensors.archive.dialects import PackedTensor
from slimtensors.archive.dialects.entries import plain_tensor_bytes
from slimtensors.archive.originals import Originals, find_originals
from slimtensors.archive.read import Archive, Progress, open_archive
from slimtensors.archive.summary import Summary
from slimtensors.archive.write import ArchiveSource, TensorSource, WriteOptions, as_source, write
from slimtensors.parallel import Each
from slimtensors.storage import HeaderEntry, StrPath, check_separate, locate


def decompress(
    source: StrPath | Archive,
    target: StrPath,
    *,
    threads: int | None = None,
    progress: Progress | None = None,
    storage_options: dict[str, Any] | None = None,
) -> Summary:
    """Write an archive as one plain safetensors file.

    The file is identical to the one that was compressed, byte for byte. It has a header of ours if
    the archive does not describe an original, or was made from several files. For folders, see
    `slimtensors.folder.decompress_folder`.

    Args:
        source: path or open archive.
        target: path of the file to write.
        threads: number of threads; default: one per core.
        progress: called with the number of bytes just processed.
        storage_options: passed to fsspec.

    Example:
        >>> from pathlib import Path
        >>> import slimtensors, torch
        >>> from safetensors.torch import save_file
        >>> save_file({"w": torch.eye(256)}, "model.safetensors", metadata={"by": "me"})
        >>> _ = slimtensors.save(slimtensors.open("model.safetensors"), "slim.safetensors")
        >>> _ = slimtensors.decompress("slim.safetensors", "again.safetensors")
        >>> Path("again.safetensors").read_bytes() == Path("model.safetensors").read_bytes()
        True
    """
    archive = open_archive(source, storage_options)
    check_separate(locate(target, storage_options=storage_options), archive.paths())
    options = WriteOptions(
        preset="dense", threads=threads, progress=progress, storage_options=storage_options
    )
    plain = as_source(archive).expand_copies()
    source_of_file = make_exact_file(plain, find_originals(archive), target, options)
    return write(source_of_file, target, options).summary()


def make_exact_file(
    source: ArchiveSource, originals: Originals | None, target: StrPath, options: WriteOptions
) -> ArchiveSource:
    """Return the source for an identical file, or for a plain one if that is not possible."""
    is_file = not locate(target, storage_options=options.storage_options).is_folder()
    if originals is None or len(originals.headers) > 1 or not is_file:
        return replace(source, originals=None)
    ((_, exact),) = make_exact_sources(source, originals).items()
    return exact


def make_exact_sources(source: ArchiveSource, originals: Originals) -> dict[str, ArchiveSource]:
    """Return {file: its content}, to be written with the header of the original."""
    items = {item.name: item for item in source.items}
    items |= {name: items[home] for name, home in source.tied.items()}
    return {
        file: _make_exact(originals.headers[file], table, items, source.tied)
        for file, table in originals.entries.items()
    }


def _make_exact(
    header: bytes,
    table: Mapping[str, HeaderEntry],
    items: Mapping[str, TensorSource],
    tied: Mapping[str, str],
) -> ArchiveSource:
    by_offset = sorted(table, key=lambda name: (table[name].begin, table[name].end))
    listed = [_make_plain(name, items[name]) for name in by_offset]
    unlisted = {name: home for name, home in tied.items() if home in table and name not in table}
    return ArchiveSource(listed, unlisted, header=header)


def _make_plain(name: str, item: TensorSource) -> TensorSource:
    """Return an item that is stored as its plain bytes, whatever it looks like."""

    def read(each: Each) -> PackedTensor:
        x = item.read(each)
        assert isinstance(x, Tensor), name
        return PackedTensor([plain_tensor_bytes(name, x, each)], None)

    return TensorSource(name, item.spec, read)
