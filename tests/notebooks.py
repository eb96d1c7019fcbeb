"""Run a notebook's cells in order, in one namespace, as Jupyter would.

`python tests/notebooks.py NOTEBOOK` stores what they print in the notebook.
"""

import ast
import contextlib
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def outputs(notebook: dict) -> Iterator[str]:
    """Run each cell, and yield what it prints and the value that it ends with."""
    namespace = {"__name__": "__main__"}
    for cell in code_cells(notebook):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            value = _run("".join(cell["source"]), namespace)
        yield printed.getvalue() + ("" if value is None else f"{value!r}\n")


def _run(source: str, namespace: dict) -> object:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "<cell>", "exec"), namespace)
    if last is None:
        return None
    return eval(compile(ast.Expression(last.value), "<cell>", "eval"), namespace)


def stored(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"])


def folder_for(folder: Path) -> Path:
    """Put beside a notebook what lies beside it in the examples."""
    shutil.copytree(EXAMPLES / "bit_packing", folder / "bit_packing")
    return folder


def main() -> None:
    path = Path(sys.argv[1]).absolute()
    notebook = json.loads(path.read_text())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder_for(Path(folder)))
        for number, (cell, text) in enumerate(
            zip(code_cells(notebook), outputs(notebook), strict=True), 1
        ):
            stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(True)}
            cell |= {"execution_count": number, "outputs": [stream] if text else []}
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
