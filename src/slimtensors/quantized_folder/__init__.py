"""Model folders with quantized weights: made, converted and undone without building the model."""

from slimtensors.quantized_folder.calibrate import calibrate_folder
from slimtensors.quantized_folder.convert import Kind, convert_folder
from slimtensors.quantized_folder.quantize import quantize_folder
from slimtensors.quantized_folder.rewrite import Rewrite

__all__ = [
    "Kind",
    "Rewrite",
    "calibrate_folder",
    "convert_folder",
    "quantize_folder",
]
