"""Check the types of all errors raised in the package.

`python tests/layout/test_errors.py` lists place, type and message of each.
"""

import ast
from pathlib import Path

import slimtensors
from slimtensors import errors

ROOT = Path(slimtensors.__file__).parent
OURS = {name for name, value in vars(errors).items() if isinstance(value, type)}
BUILTIN = {
    "AttributeError",  # modules that import on demand
    "DivergedError",  # a MismatchError; the follower catches it and starts elsewhere
    "FileExistsError",  # remote file that must be new
    "FileNotFoundError",
    "IndexError",  # row out of range
    "KeyError",  # name not in an archive
    "OSError",
    "TypeError",  # argument that is not a codec
    "ValueError",  # closed archive; or caught by a caller that adds the file name
}


def find_errors():
    """Yield place, type and message of each `raise`; runtime values in a message become `…`."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield place, name, message_text(node.exc.args[0])


def message_text(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(map(message_text, node.values))
    return node.value if isinstance(node, ast.Constant) else "…"


def test_every_error_is_ours_or_an_expected_builtin():
    # "": `type(error)(...)` re-raises the same type; kind: the argument of `report_malformed`
    allowed = OURS | BUILTIN | {"SystemExit", "", "kind"}
    unexpected = [(place, name) for place, name, _ in find_errors() if name not in allowed]
    assert unexpected == []


if __name__ == "__main__":
    for place, name, message in find_errors():
        print(f"{place} {name}: {message}")
