"""Recipes that are not what they should be: every error is a `ConfigError` with the file's name."""

import pytest

from slimtensors.errors import ConfigError
from slimtensors.recipe import Recipe

pytestmark = pytest.mark.hostile

VALID = "a_stage:\n  a_modifiers:\n    GPTQ: {scheme: W4A16}\n"


def alias_bomb(levels: int = 40, merge: bool = False) -> str:
    """Return nine references to nine references to …: a few lines for more items than atoms."""
    lines = ["x0: &x0 {a: 1}" if merge else "x0: &x0 [1, 2]"]
    for i in range(levels):
        names = ", ".join([f"*x{i}"] * 9)
        lines.append(f"x{i + 1}: &x{i + 1} " + (f"{{<<: [{names}]}}" if merge else f"[{names}]"))
    return "\n".join(lines)


HOSTILE = {
    "aliases of aliases": alias_bomb(),
    "merged aliases": alias_bomb(merge=True),
    "an alias of itself": "a_stage: &a [*a]\n",
    "a long number": VALID + "x: " + "9" * 5000,
    "lists nested too deeply": "[" * 20_000,
    "mappings nested too deeply": "{a: " * 3000 + "}" * 3000,
    "a date that does not exist": VALID + "x: 2001-99-99",
    "a mapping as a key": VALID + "? {a: b}\n: c",
    "a Python object": "x: !!python/object/apply:os.system ['true']",
    "a scheme that is a number": VALID.replace("W4A16", "4"),
    "a scheme that is a list": VALID.replace("W4A16", "[W4A16]"),
    "bytes": "a: \x00",
    "null": "null",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_malformed_recipe_raises_config_error(text, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.yaml") as caught:
        Recipe.load(path)
    assert len(str(caught.value)) < 2000


def test_aliases_still_work():
    text = "a_stage:\n  a_modifiers:\n    GPTQ: {scheme: W4A16, ignore: &i [lm_head]}\n"
    text += "    SmoothQuant: {ignore: *i}\n"
    assert len(Recipe.from_yaml(text).modifiers) == 2
