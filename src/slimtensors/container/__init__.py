"""Safetensors files: header, reading, writing, shards."""

from slimtensors.container.header import Entry, Header, check_name, has_code
from slimtensors.container.hidden import (
    MARK,
    hidden_folder,
    hidden_name,
    remove_abandoned,
    replace_folder,
    sync_folder,
)
from slimtensors.container.place import LocalPlace, Place, RemotePlace, StrPath, local, place
from slimtensors.container.reader import (
    DELTA,
    DISTRIBUTED,
    INDEX,
    SINGLE,
    UNFINISHED,
    StoredFile,
    is_distributed,
    is_inside,
    open_file,
    open_files,
    weight_files,
)
from slimtensors.container.remote import RemoteOutput, sending_folder
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
from slimtensors.container.writer import Chunk, Piece

__all__ = [
    "DELTA",
    "DISTRIBUTED",
    "INDEX",
    "MARK",
    "SINGLE",
    "UNFINISHED",
    "Chunk",
    "Entry",
    "FileOutput",
    "FolderOutput",
    "Header",
    "LocalPlace",
    "Output",
    "Piece",
    "Place",
    "RemoteOutput",
    "RemotePlace",
    "StoredFile",
    "StrPath",
    "check_name",
    "has_code",
    "hidden_folder",
    "hidden_name",
    "is_distributed",
    "is_inside",
    "local",
    "note_parameters",
    "old_files",
    "open_file",
    "open_files",
    "parse_size",
    "place",
    "remove_abandoned",
    "replace_folder",
    "sending_folder",
    "sync_folder",
    "weight_files",
    "write_index",
    "write_json",
]
