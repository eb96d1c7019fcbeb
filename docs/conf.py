"""Configuration of Sphinx: `make docs`."""

import logging
import sys
from importlib import metadata
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.ext.napoleon import GoogleDocstring

sys.path.insert(0, str(Path(__file__).parent))

from generated import FILLED

for name in ("torchao", "torch.utils._pytree"):  # transformers imports torchao, which warns
    logging.getLogger(name).setLevel(logging.ERROR)

project = "slimtensors"
release = metadata.version("slimtensors")
copyright = "the slimtensors authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["_build"]
smartquotes = False  # would turn --options into dashes

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"slimtensors {release}"
html_copy_source = False

default_role = "code"  # docstrings use `names` as in Markdown
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True


def setup(app: Sphinx) -> None:
    """Connect the generated parts."""
    app.connect("source-read", _fill)
    app.connect("autodoc-process-docstring", _format_sections)


def _format_sections(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Format `Args:` and `Example:`; as an extension, napoleon would also parse attributes."""
    if what in ("class", "exception", "function", "method"):
        lines[:] = GoogleDocstring(lines, what=what, name=name, obj=thing).lines()


def _fill(app: Sphinx, page: str, source: list[str]) -> None:
    if page in FILLED:
        assert "<!-- filled in -->" in source[0], page
        source[0] = source[0].replace("<!-- filled in -->", FILLED[page]())
    source[0] = source[0].replace("](../benchmarks/RESULTS.md", "](results.md")
