"""Help texts, shell completion and `env`."""

import argparse
import json
import shlex
import shutil
import subprocess
from pathlib import Path

import jsonschema
import pytest
import torch

import slimtensors
from slimtensors import _core
from slimtensors.cli import main, parser
from slimtensors.codecs import presets

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def verbs():
    (found,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return found.choices


def completion_script(shell, capsys):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", verbs())
def test_every_example_in_a_help_text_parses(name):
    title, *examples = verbs()[name].epilog.splitlines()
    assert title == "examples:"
    for example in examples:
        words = shlex.split(example.partition(" > ")[0], comments=True)
        assert words[:2] == ["slimtensors", name]
        parser().parse_args(words[1:])


def complete(script, line):
    """Return the completions of bash for the last word of `line`."""
    words = line.split(" ")
    quoted = " ".join(map(shlex.quote, words))
    setup = f"COMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _shtab_slimtensors; "
    command = f'{script}\n{setup}printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def test_bash_completes_verbs_options_and_values(capsys):
    text = completion_script("bash", capsys)
    assert set(verbs()) == set(complete(text, "slimtensors "))
    assert complete(text, "slimtensors dec") == ["decompress"]
    assert complete(text, "slimtensors verify --a") == ["--against"]
    assert complete(text, "slimtensors compress x --preset ") == list(presets.PRESETS)
    assert complete(text, "slimtensors compress x --quantize W4A16_") == ["W4A16_ASYM"]
    assert complete(text, "slimtensors completion z") == ["zsh"]
    assert complete(text, "slimtensors compress mod") == [], "the shell completes files"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_contain_every_option_and_parse(shell, capsys):
    text = completion_script(shell, capsys)
    for name, verb in verbs().items():
        assert name in text
        for option in verb._option_string_actions:
            assert (f"-l {option[2:]} " if shell == "fish" else option) in text or option[1] != "-"
    if shutil.which(shell):
        subprocess.run([shell, "-n", "/dev/stdin"], input=text, text=True, check=True)


def test_an_unknown_shell_is_refused(capsys):
    with pytest.raises(SystemExit) as refused:
        main(["completion", "csh"])
    assert refused.value.code == 2
    assert "bash" in capsys.readouterr().err


def test_env_json_matches_its_schema(capsys):
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    schema = json.loads((SCHEMAS / "env.json").read_text())
    jsonschema.validate(found, schema, jsonschema.Draft202012Validator)
    assert found["slimtensors"] == slimtensors.__version__
    assert found["packages"]["torch"] == torch.__version__
    assert {"transformers", "remote"} <= found["extras"].keys()


def test_env_prints_one_line_per_item(capsys):
    assert main(["env"]) == 0
    lines = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert lines["slimtensors"] == slimtensors.__version__
    assert lines["core"] == f"{_core.cpu()} code"
    assert "transformers" in lines["[transformers]"]
