"""What a person looks at: models, variants of them and runs, as one page that opens anywhere."""

from slimtensors.report.chain import collect_run, links
from slimtensors.report.collect import collect, collect_variant, new_report
from slimtensors.report.data import Link, Report, TensorReport, Variant
from slimtensors.report.files import is_report, read_report, write_report
from slimtensors.report.histogram import Histogram
from slimtensors.report.page import page, write_page
from slimtensors.report.recipe import read_recipe

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
