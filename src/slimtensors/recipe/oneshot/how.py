"""What one modifier is run with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from slimtensors.calibration import Batch
from slimtensors.quantization.algorithms import Progress


@dataclass(frozen=True)
class How:
    """Data to run the model on, a folder for what is finished, and who hears of it."""

    batches: Sequence[Batch] = ()
    folder: Path | None = None
    progress: Progress | None = None
