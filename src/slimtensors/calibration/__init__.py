"""The data that a model is run on to see what flows through it."""

from slimtensors.calibration.data import Batch, Calibration, Data, batches_for

__all__ = ["Batch", "Calibration", "Data", "batches_for"]
