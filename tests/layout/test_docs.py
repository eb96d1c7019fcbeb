"""Every block of code in the documentation runs, in order, in one namespace per page."""

import os
import re
import shlex
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import slimtensors
from slimtensors.cli import main

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = "<!-- not run -->"

_FENCE = re.compile(r"^```([^`\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page):
    """Yield line number, language and text of the blocks that are to run."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        if before.strip() != NOT_RUN:
            yield text[: found.start()].count("\n") + 2, found.group(1), found.group(2)


def commands(text):
    """The commands of a shell block that are ours, without their comments and prompts."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        line = line.removeprefix("$ ")
        if line.startswith("slimtensors "):
            yield line


def run_command(command):
    """Run a command of ours here, where torch is imported already; what needs a shell, in one."""
    words = shlex.split(command, comments=True)
    if {">", "|", "&&"} & set(words):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command, shell=True, check=False, env={**os.environ, "PATH": path}
        ).returncode
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.resetwarnings()  # as in a process of its own
        try:
            return main(words[1:])
        except SystemExit as ended:
            return ended.code or 0
        finally:
            torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_code_on_a_page_runs(page, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "__page__"}
    for line, language, text in blocks(page):
        if language == "python":
            code = compile("\n" * (line - 1) + text, str(page), "exec")
            exec(code, namespace)
        elif language in ("bash", "console", "sh"):
            for command in commands(text):
                code = run_command(command)
                assert code == 0, f"{page.name}: {command}\n{capfd.readouterr().err}"


def test_every_page_is_found():
    assert {"README.md", "format.md", "start.md"} <= {page.name for page in PAGES}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.slow
def test_the_documentation_is_made_without_a_warning_and_holds_every_public_name(tmp_path):
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    command += [ROOT / "docs", tmp_path / "html"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    made = {page.stem: page.read_text() for page in (tmp_path / "html").glob("*.html")}
    assert {page.stem for page in PAGES} - {"README"} <= made.keys()
    for module in (slimtensors, slimtensors.quantization):
        for name in module.__all__:
            assert f'id="{module.__name__}.{name}"' in made["api"], name
    for verb in ("compress", "env", "completion"):
        assert f'<section id="{verb}">' in made["cli"], verb
    for schema in (ROOT / "docs" / "schemas").glob("*.json"):
        assert f'<section id="{schema.stem}">' in made["schemas"], schema


def test_the_table_of_the_readme_is_that_of_the_results():
    tables = [
        re.search("<!-- results -->.*<!-- end of results -->", page.read_text(), re.DOTALL)
        for page in (ROOT / "README.md", ROOT / "benchmarks" / "RESULTS.md")
    ]
    assert tables[0].group() == tables[1].group()
