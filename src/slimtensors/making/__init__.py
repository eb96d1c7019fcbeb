"""Making model folders anew: file by file, by one process or many, again where one was stopped."""

from slimtensors.making.job import job_of
from slimtensors.making.make import make_folder, remake
from slimtensors.making.weights import How, Weights

__all__ = ["How", "Weights", "job_of", "make_folder", "remake"]
