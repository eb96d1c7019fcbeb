"""The documentation: code blocks run, links resolve, figures come from measured results."""

import importlib
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
    """Yield line number, language and text of the blocks to run, HTML comments included."""
    text = page.read_text()
    for found in _FENCE.finditer(text):
        before = text[: found.start()].rstrip("\n").rpartition("\n")[2]
        if before.strip() != NOT_RUN:
            yield text[: found.start()].count("\n") + 2, found.group(1), found.group(2)


def commands(text):
    """Yield the slimtensors commands of a shell block, without prompts."""
    joined = text.replace("\\\n", " ")
    for line in joined.splitlines():
        line = line.removeprefix("$ ")
        if line.startswith("slimtensors "):
            yield line


def run_command(command):
    """Run a command in this process, which has imported torch, or in a shell if it needs one."""
    words = shlex.split(command, comments=True)
    if {">", "|", "&&"} & set(words):
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            command, shell=True, check=False, env={**os.environ, "PATH": path}
        ).returncode
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.resetwarnings()  # as in a separate process
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
def test_links_between_pages_resolve(page):
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} -> {target}"


@pytest.mark.slow
def test_the_documentation_builds_without_warnings_and_lists_every_public_name(tmp_path):
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


@pytest.fixture
def results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("results")


def test_the_readme_table_is_generated_from_the_results(results):
    claims = results.read_claims(results.RESULTS.read_text())
    readme = (ROOT / "README.md").read_text()
    assert results.find_block(readme) == results.short(claims)


def test_the_readme_table_separates_wins_from_losses(results):
    claims = results.read_claims(results.RESULTS.read_text())
    for rows, is_win in ((results.AHEAD, True), (results.BEHIND, False)):
        for row in rows:
            factors = [x.of(claims) for x in (row.smaller, row.saves, row.loads) if x]
            assert all((factor >= 1) == is_win for factor in factors), row.title


def test_new_results_replace_claims_and_keep_the_tables_below_them(results):
    before = (
        "# Results\n\nAbout.\n\n- machine\n\n## gptq\n\nold\n\n### Table\n\nkept\n\n"
        "## other\n\nsame\n"
    )
    machine = {"cpu": "x", "cores": 2, "memory_bytes": 2**30, "huge_pages": "", "kernel": "6"}
    result = {
        "date": "2026-01-01",
        "claims": [{"claim": "speed", "value": 2.0, "target": ">= 1", "met": True}],
        "machine": {**machine, "python": "3.11", "versions": {}, "commit": "abc"},
        "cores_used_by_others": 0.0,
        "disturbed": False,
    }
    page = results.page({"gptq": result}, before)
    assert results.read_claims(page)["gptq"] == {"speed": 2.0}
    assert "### Table\n\nkept\n\n## other\n\nsame\n" in page
    assert "old" not in page


def test_the_chart_is_drawn_from_figures_in_the_results(results):
    chart = importlib.import_module("chart")
    rows = chart.read()
    sections = results.RESULTS.read_text().split("\n## ")
    for row in rows:
        if row["benchmark"]:
            (section,) = (x for x in sections if x.startswith(f"{row['benchmark']}\n"))
            assert row["value"] in section, row
    assert chart.TARGET.read_text() == chart.draw(chart.make_panels(rows))


@pytest.fixture
def fit_chart(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    return importlib.import_module("fit_chart")


def test_the_fit_chart_is_drawn_from_its_table(fit_chart):
    assert fit_chart.TARGET.read_text() == fit_chart.draw(fit_chart.read_points())


def test_fitted_models_are_compared_with_the_best_gguf_types_only_between_measured_sizes(fit_chart):
    def point(method, size, kl):
        return fit_chart.Point("smollm2", method, size, kl)

    ours = [point("slimtensors fit 40", 40, 0.4), point("slimtensors fit 60", 60, 0.1)]
    peers = [point("GGUF Q2", 80, 0.2), point("GGUF Q3", 81, 0.3), point("GGUF Q5_K_M", 50, 0.9)]
    small, best = fit_chart.compare([*ours, *peers])
    assert (small.peer, best.peer) == ("GGUF Q5_K_M", "GGUF Q2")  # Q3 is larger and worse than Q2
    assert best.bytes_ratio == pytest.approx((40 * 60) ** 0.5 / 80)
    assert best.kl_ratio != best.kl_ratio  # no fitted model of 80 bytes
    assert 0.1 / 0.9 < small.kl_ratio < 0.4 / 0.9
    assert (small.goal, best.goal) == (0.8, 0.7)
