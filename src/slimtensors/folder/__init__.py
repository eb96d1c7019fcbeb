"""Model folders: compress, quantize, convert, store as a delta."""

from slimtensors.folder.compress import compress_folder, decompress_folder
from slimtensors.folder.convert import Kind, Rewrite, convert_folder
from slimtensors.folder.delta import diff_folder, restore_folder
from slimtensors.folder.quantize import quantize_folder
from slimtensors.folder.weights import FolderOptions

__all__ = [
    "FolderOptions",
    "Kind",
    "Rewrite",
    "compress_folder",
    "convert_folder",
    "decompress_folder",
    "diff_folder",
    "quantize_folder",
    "restore_folder",
]
