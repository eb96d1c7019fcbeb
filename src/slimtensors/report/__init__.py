"""Reports on models, their variants and training runs, as JSON or a self-contained HTML page."""

from slimtensors.report.collect import (
    collect,
    collect_checkpoints,
    collect_run,
    collect_variant,
    new_report,
)
from slimtensors.report.data import (
    CheckpointReport,
    Histogram,
    Report,
    TensorReport,
    Variant,
    is_report,
    read_fit_report,
    read_recipe,
    read_report,
    write_report,
)
from slimtensors.report.page import render_page, write_page

__all__ = [
    "CheckpointReport",
    "Histogram",
    "Report",
    "TensorReport",
    "Variant",
    "collect",
    "collect_checkpoints",
    "collect_run",
    "collect_variant",
    "is_report",
    "new_report",
    "read_fit_report",
    "read_recipe",
    "read_report",
    "render_page",
    "write_page",
    "write_report",
]

# Names of earlier versions.
Link, links, page = CheckpointReport, collect_checkpoints, render_page
