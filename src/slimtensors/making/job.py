"""What a run makes of what: two runs with the same job write the same bytes."""

from importlib.metadata import version
from typing import Any

from slimtensors import _core
from slimtensors.archive import Archive
from slimtensors.beside import folder_of
from slimtensors.container import Place
from slimtensors.spec import Json


def job_of(archive: Archive, where: Place, options: dict[str, Any]) -> Json:
    """Describe a job by its options, and by what tells the source from another one."""
    folder = folder_of(where)
    weights = {
        file.key: [folder.child(file.key).stamp(), _core.crc32c(file.text)]
        for file in archive.files
    }
    return {**options, "version": version("slimtensors"), "weights": weights}
