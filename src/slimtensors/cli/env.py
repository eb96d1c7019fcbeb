"""`slimtensors env`: what a report of a bug should tell about the machine."""

import argparse
import os
import platform
import re
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch

import slimtensors
from slimtensors import _core
from slimtensors.cli import console
from slimtensors.tensor import Json

_REQUIREMENT = re.compile(r"([\w.-]+)[^;]*(?:;.*\bextra == ['\"]([\w-]+)['\"])?")


def add_to(verbs: "console.Verbs") -> None:
    """Add the verb."""
    verb = console.new_verb(
        verbs,
        "env",
        "tell versions, processor and installed extras, for a report of a bug",
        "slimtensors env",
        "slimtensors env --json",
    )
    console.add_json(verb)
    verb.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print one line per fact."""
    found = about()
    if options.json:
        console.print_json(found)
        return 0
    rows = [
        *((name, str(found[name])) for name in ("slimtensors", "python", "platform", "processor")),
        ("cores", f"{found['cores']}, torch uses {found['torch_threads']}"),
        ("core", f"{found['core']} code"),
        *((name, text or "missing") for name, text in found["packages"].items()),
        *((f"[{extra}]", _listed(packages)) for extra, packages in found["extras"].items()),
    ]
    width = max(len(name) for name, _ in rows) + 2
    print("\n".join(f"{name:{width}}{text}" for name, text in rows))
    return 0


def about() -> Json:
    """Return it as the schema of `env --json` says; a package that is missing is null."""
    needed, extras = _requirements()
    return {
        "slimtensors": slimtensors.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "core": _core.cpu(),
        "packages": {name: _version(name) for name in needed},
        "extras": {
            extra: {name: _version(name) for name in names} for extra, names in extras.items()
        },
    }


def _requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the packages that are always needed, and those of each extra."""
    needed: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in requires("slimtensors") or []:
        found = _REQUIREMENT.match(line)
        assert found, line
        name, extra = found.groups()
        (needed if extra is None else extras.setdefault(extra, [])).append(name)
    return needed, extras


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    """Return the name that the kernel has for it, where it tells one."""
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines() if facts.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _listed(packages: dict[str, str | None]) -> str:
    return ", ".join(f"{name} {found or 'missing'}" for name, found in packages.items())
