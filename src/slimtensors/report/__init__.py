"""What a person looks at: models, variants of them and runs, as one page that opens anywhere."""

from slimtensors.report.collect import collect, collect_run, collect_variant, links, new_report
from slimtensors.report.data import (
    Histogram,
    Link,
    Report,
    TensorReport,
    Variant,
    is_report,
    read_recipe,
    read_report,
    write_report,
)
from slimtensors.report.page import page, write_page

__all__ = [
    "Histogram",
    "Link",
    "Report",
    "TensorReport",
    "Variant",
    "collect",
    "collect_run",
    "collect_variant",
    "is_report",
    "links",
    "new_report",
    "page",
    "read_recipe",
    "read_report",
    "write_page",
    "write_report",
]
