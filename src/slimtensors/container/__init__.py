"""Safetensors files: header, reading, writing, shards."""

from slimtensors.container.header import Entry, Header, check_name, has_code
from slimtensors.container.place import LocalPlace, Place, StrPath, local, place
from slimtensors.container.reader import (
    DELTA,
    INDEX,
    SINGLE,
    StoredFile,
    is_inside,
    open_file,
    open_files,
    weight_files,
)
from slimtensors.container.shards import (
    FileOutput,
    FolderOutput,
    Output,
    note_parameters,
    old_files,
    parse_size,
    write_index,
    write_json,
)
from slimtensors.container.writer import Chunk, Piece, sync_folder

__all__ = [
    "DELTA",
    "INDEX",
    "SINGLE",
    "Chunk",
    "Entry",
    "FileOutput",
    "FolderOutput",
    "Header",
    "LocalPlace",
    "Output",
    "Piece",
    "Place",
    "StoredFile",
    "StrPath",
    "check_name",
    "has_code",
    "is_inside",
    "local",
    "note_parameters",
    "old_files",
    "open_file",
    "open_files",
    "parse_size",
    "place",
    "sync_folder",
    "weight_files",
    "write_index",
    "write_json",
]
