"""Every message of every error that is raised on purpose, read as a user would.

`python tests/layout/test_errors.py` lists them all, for somebody who wants to read them.
"""

import ast
import re
from pathlib import Path

import slimtensors
from slimtensors import errors

ROOT = Path(slimtensors.__file__).parent
OURS = {name for name, thing in vars(errors).items() if isinstance(thing, type)}
BUILTIN = {
    "AttributeError",  # of modules that import on demand
    "FileNotFoundError",
    "IndexError",  # rows that a tensor does not have
    "KeyError",  # names that an archive does not have
    "OSError",
    "TypeError",  # of codecs that are no codecs
    "ValueError",  # of a closed archive, as of closed files; or caught by who knows the file
}


def messages():
    """Yield place, class and text of each error; what is only known when it runs becomes `…`."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                name = getattr(node.exc.func, "id", getattr(node.exc.func, "attr", ""))
                place = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield place, name, text(node.exc.args[0])


def text(node):
    if isinstance(node, ast.JoinedStr):
        return "".join(map(text, node.values))
    return node.value if isinstance(node, ast.Constant) else "…"


MESSAGES = list(messages())


def test_all_are_found():
    assert len(MESSAGES) > 400


def test_every_error_is_ours_or_one_that_a_stranger_expects():
    known = OURS | BUILTIN | {"SystemExit", ""}  # none for `type(error)(…)`, the same again
    unexpected = [(place, name) for place, name, _ in MESSAGES if name not in known]
    assert unexpected == []


def complaints(name, said):
    """What is wrong with a message, if anything."""
    if name == "MissingDependencyError" or said.strip("…: ") == "":
        return  # the class makes the sentence; or a message from below gets a place before it
    if said.endswith((".", "!", "\n")) and not said.endswith("=..."):
        yield "ends like a sentence; what calls us goes on after it"
    if re.match(r"[A-Z][a-z]+ ", said):
        yield "begins like a sentence; a file or a tensor may come before it"
    if len(re.findall(r"\w+|…", said)) < 3:
        yield "says too little"
    if len(said) > 250:
        yield "is longer than anybody reads"


def test_every_message_says_what_it_was_and_goes_on_from_a_name():
    found = [
        f"{place}: {said!r} {complaint}"
        for place, name, said in MESSAGES
        for complaint in complaints(name, said)
    ]
    assert found == []


if __name__ == "__main__":
    for place, name, said in MESSAGES:
        print(f"{place} {name}: {said}")
